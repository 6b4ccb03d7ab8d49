"""Batches on their way from the worker that makes them to the workers that read them.

1. A worker's engine returns a batch. ``results.ObjectProcess`` holds it in the worker and reports its size.
2. The controller reserves that many bytes in the worker's host (``budget``), waiting until there is room, and then has
   the worker put each column into the host's object store as one object (``results.StoreCalls``, ``store``).
3. The controller gets a batch of ``StoredColumn``s: references, and where each row lies. No token passes through it.
4. For the next call it decides which rows each worker reads, so that all finish at about the same time (``sharding``).
5. The batch is sent once, with the rows of each worker beside it. On another host than its blocks', a worker fetches
   only the rows that it reads (``slices``).
6. When nobody refers to a block any more, Ray frees it and the budget gets its bytes back.
"""
