"""Engines: the libraries that run the roles of a recipe, each behind the same capabilities.

One file per library; its name is the engine's name in a recipe: ``transformers``, ``vllm``, ``torch``, ``deepspeed``,
``fsdp`` and, for tests of the runtime, ``fake``. ``base.py`` defines the capabilities and the ``EngineSpec`` that an
engine is built from. ``registry.py`` finds an engine by its name; it imports no model library, so recipes compile
without one.

Prompts come in as token ids and leave ``generate`` as rollouts. Sequences come in and leave ``logprobs``, ``values``
or ``evaluate`` as one number per token or response. Minibatches and a loss go into ``update``, and trained weights
leave through ``weights()``, in ``buckets.py`` if they travel through an object store.

``causal_lm/`` runs transformers models on packed sequences; every engine but ``fake`` uses it. ``trainer.py`` holds
what ``torch.py``, ``deepspeed.py`` and ``fsdp.py`` share: passes, updates, exports. ``serving/`` holds the parts of
``vllm.py``, ``sharded/`` those of models that are spread over several processes, and checkpoints.
``group_progress.py`` keeps track of unfinished responses, ``memory.py`` of the memory of an engine's process.
"""
