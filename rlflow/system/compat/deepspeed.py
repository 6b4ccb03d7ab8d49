"""Private names of DeepSpeed: each rank's range of the weights and moments, which a checkpoint stores.

DeepSpeed documents its own format of checkpoints alone, which fits one number of ranks and one stage of ZeRO.
"""

from typing import Any


def weight_fragment(weight: Any) -> Any:
    """Return this rank's range of a weight under ZeRO 1 or 2; None if another rank has all of it."""
    return weight._hp_mapping


def zero3_values(zero3: Any, weight: Any, moment: str | None) -> Any:
    """Return this rank's range of a weight, or of one of its moments, under ZeRO 3."""
    values, _ = zero3._get_fp32_opt_state_partition(weight, release_swap_buffers=False, optim_state_key=moment)
    return values


def relink_moments(zero: Any, *, now: bool) -> None:
    """Make the views of the moments that each weight has under ZeRO 1 and 2 anew, at the latest in the next step."""
    zero._hp_optimizer_states_linked = False
    if now:
        zero._lazy_init_hp_params_optimizer_state()
