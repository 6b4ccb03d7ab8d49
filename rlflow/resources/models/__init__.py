"""The sizes of a model: the figures of its ``config.json``, its parameters, and its LoRA adapters."""
