"""The runtime on Ray: every worker of the plan is an actor on the GPUs that the plan gives it.

1. ``cluster/`` finds or starts Ray, matches the plan's hosts to Ray's, and checks which GPUs are really there.
2. ``runtime.RayRuntime`` reserves the plan's GPUs as one placement group, and proves that they are the planned ones.
3. ``engine_set.start_engines`` starts all workers of all roles (``role_workers``, ``worker``), each with the engine
   that ``engine_specs`` derives from the plan.
4. The graph sees one engine per role, a ``role_proxy.RoleProxy``. It divides the rows of each call among the workers
   and joins their results, which travel through the object stores (``runtime/objects``).
5. Roles that share GPUs use them in turns (``gpu_turns``). A ``watchdog`` ends processes that are stopped or hang;
   ``waits`` says after how long.
"""
