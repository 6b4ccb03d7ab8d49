"""Batches on their way from the worker that makes them to the workers that read them.

1. A worker's engine returns a batch. ``object_process.ObjectProcess`` puts each column into the host's object store as
   one object (``store``).
2. The controller gets a batch of ``StoredColumn``s: references, and where each row lies. No token passes through it.
   It counts the bytes (``store_usage``).
3. For the next call it decides which rows each worker reads, so that all finish at about the same time (``sharding``).
4. The batch is sent once, with the rows of each worker beside it. On another host than its blocks', a worker fetches
   only the rows that it reads (``slices``).
5. When nobody refers to a block any more, Ray frees it.
"""
