"""One optimizer step of GRPO on one GPU: rlflow beside DeepSpeed, TRL, and the best that public parts give.

``cases.py`` has the models and the batches, ``arms.py`` and ``composite.py`` the systems, ``worker.py`` measures one of
them in a process of its own, and ``report.py`` compares them. ``parts.py`` times single parts of an update.
"""
