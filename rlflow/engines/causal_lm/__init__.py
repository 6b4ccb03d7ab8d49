"""Causal language models of the transformers library, run on packed sequences without padding.

``pretrained.py`` loads and saves a model and its tokenizer, ``adapters.py`` adds LoRA, and ``kernels.py`` picks the
attention kernel. A batch is cut into micro-batches of bounded size (``micro_batches.py``), and each of them is packed
into one stream of tokens in which the rollouts of a prompt share its tokens (``packing.py``). The model reads the
stream through rlflow's attention function (``attention.py``).

``token_outputs.py`` turns a pass into logprobs, values or rewards per response token; ``output_layer.py`` computes the
logprobs without ever holding all logits. ``totals.py`` sums the loss and the metrics of all passes of one optimizer
step. ``decoding.py`` generates token by token. ``expert_files.py`` names experts as a model's files do, for syncs.
"""
