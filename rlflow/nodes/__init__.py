"""The nodes of a graph: what an algorithm does in a step. Importing this package registers their kinds.

Data goes through the room in this order:

1. ``generate`` samples responses to prompts (``environment_session``: in turns with an environment).
2. ``scoring`` computes logprobs and values of them; ``reward`` and ``reward_model`` give rewards.
3. ``reward_shaping`` subtracts penalties (``kl``); ``dynamic_sampling`` selects prompts.
4. ``advantages`` and ``gae`` turn rewards into advantages.
5. ``policy_update`` and ``policy_variants`` (loss: ``policy_loss``), ``value_update`` and ``preference`` train, in
   ``minibatches``.

``base`` defines what a node declares.
"""

from rlflow.nodes import (
    advantages,
    dynamic_sampling,
    gae,
    generate,
    policy_update,
    policy_variants,
    preference,
    reward,
    reward_model,
    reward_shaping,
    scoring,
    value_update,
)

__all__ = ["advantages", "dynamic_sampling", "gae", "generate", "policy_update", "policy_variants", "preference"]
__all__ += ["reward", "reward_model", "reward_shaping", "scoring", "value_update"]
