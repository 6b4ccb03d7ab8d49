"""The planner finds the fastest placement of all roles on a cluster.

1. ``search.sharing``: list the ways in which roles may share GPUs; ``search.pool_sizes`` the sizes of their pools.
2. ``search.pool_search``: find the best use of each pool. Memory is checked first, then time is predicted.
3. ``search.model_layouts`` and ``search.engine_layouts``: list the degrees of one role; ``prediction.role_memory`` and
   ``prediction.task_times`` predict its memory and its seconds.
4. ``simulate``: schedule the nodes of a step on the pools, for all sizes at once.
5. ``placement_solver``: assign the groups of the fastest candidates to hosts, exactly.
6. ``prediction.prediction``: write down what the chosen plan needs and how long it takes, with warnings.

``search.search`` runs these stages in order. ``inputs``, ``pools`` and ``candidate`` have the types that they share.
"""
