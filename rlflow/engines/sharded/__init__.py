"""Models that several processes train together: the parts of ``engines/deepspeed.py`` and ``engines/fsdp.py``.

``engine.py`` is what both engines share, and ``process_group.py`` connects the ranks of a role. ``trained_state.py``
knows where a rank has the values that it trains, and ``checkpoints.py`` writes them so that any number of ranks can
restore them. ``cpu_offload.py`` moves weights and optimizer state to host memory while the engine sleeps.
For DeepSpeed, ``settings.py`` configures it, and ``loading.py`` reads a model layer by layer into ZeRO-3 shards. For
torch, ``mesh.py`` shards a model over a mesh of ranks, ``experts.py`` divides experts among them, ``shards.py`` loads a
model so that each rank reads its shards, and ``shard_values.py`` and ``sharded_state.py`` find a rank's values in them.
``ulysses.py`` splits each sequence among neighbouring ranks (sequence parallelism). The torch engine uses
``process_group.py``, ``ulysses.py`` and the checkpoints too.
"""
