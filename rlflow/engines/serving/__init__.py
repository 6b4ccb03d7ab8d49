"""The parts of the vLLM engine, ``engines/vllm.py``.

``settings.py`` prepares the model's files, the environment variables and the arguments that vLLM starts with.
``batching.py`` owns vLLM's engine in a thread and batches the requests of all callers; ``activity.py`` records what
the engine does in each second. ``sessions.py`` is the side that the runtime calls: it hands an engine sample after
sample, learns which are done, and takes unfinished ones back. ``weights.py`` checks new weights and passes them to
vLLM's ranks, where ``vllm_worker.py`` loads them.
"""
