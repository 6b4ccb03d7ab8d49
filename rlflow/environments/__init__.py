"""Environments that answer a model turn by turn, and the conversations with them.

The built-in environments are in ``classes``, one file each. ``turn`` runs their turns in worker processes, which
``calls`` starts. An ``Exchange`` is the other side of an engine's conversations, whose ``transcript`` it continues.
``conversations`` holds them on an engine that generates in batches, and ``conversation_engine`` on one that takes new
samples while it generates.
"""
