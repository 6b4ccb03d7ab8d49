"""The planner finds the fastest placement of all roles on a cluster.

1. ``search.sharing``: list the ways in which roles may share GPUs, and the sizes of their pools.
2. ``search.pool_search``: find the best use of each pool. Memory is checked first, then time is predicted.
3. ``search.layouts``: list the degrees, ZeRO stages and micro-batches of one role; ``prediction.task_times`` predicts
   its seconds.
4. ``simulate``: schedule the nodes of a step on the pools.
5. ``placement_solver``: assign the groups of the fastest candidates to hosts, exactly.
6. ``prediction.prediction``: write down what the chosen plan needs and how long it takes, with warnings.

``search.search`` runs these stages in order; ``pool`` has the types that they share.
"""
