"""The nodes of a graph: what an algorithm does in a step. Importing this package registers their kinds.

Data goes through the room in this order:

1. ``generate`` samples responses to prompts, in one piece or in turns with an environment; in ``agent``, programs call
   the model.
2. ``scoring`` computes logprobs, values and rewards of them by models, ``reward`` rewards by functions.
3. ``reward_shaping`` subtracts penalties (``kl``), and ``reward_gate`` checks a reward model's scores;
   ``dynamic_sampling`` selects prompts, ``curriculum`` draws them, ``preference_pairs`` makes pairs of responses.
4. ``advantages``, ``advantage_by_part``, ``turns`` and ``critic`` turn rewards into advantages.
5. ``policy_update``, ``policy_variants``, ``policy_gates`` and ``policy_covariance`` (loss: ``policy_loss``),
   ``critic``, ``preference``, ``preference_free``, ``distillation`` (teachers behind servers: ``teacher_server``) and
   ``sft`` train, in ``minibatches``.

``base`` defines what a node declares.
"""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f".{_module.name}", __name__)
