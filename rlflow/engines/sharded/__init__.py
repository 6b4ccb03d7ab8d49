"""Models that several processes train together: the parts of the DeepSpeed engine, ``engines/deepspeed.py``.

``process_group.py`` connects the ranks of a role, and ``settings.py`` configures DeepSpeed for them. ``loading.py``
reads a model layer by layer into ZeRO-3 shards. ``trained_state.py`` knows where a rank has the values that it trains,
and ``checkpoints.py`` writes them so that any number of ranks can restore them. ``cpu_offload.py`` moves weights and
optimizer state to host memory while the engine sleeps.
``ulysses.py`` splits each sequence among neighbouring ranks (sequence parallelism). The torch engine uses
``process_group.py``, ``ulysses.py`` and the checkpoints too.
"""
