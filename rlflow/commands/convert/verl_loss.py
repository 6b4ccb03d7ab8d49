"""The update of a policy for a script of verl."""

from collections.abc import Mapping
from typing import Any

from rlflow.commands.convert.verl_arguments import ACTOR, AGGREGATIONS, KL_ESTIMATORS, Arguments
from rlflow.errors import RecipeError

_CORRECTION = "algorithm.rollout_correction"
_NODES: Mapping[str, str] = {"vanilla": "policy_update", "gspo": "gspo_update", "cispo": "cispo_update"}


def loss_of(arguments: Arguments) -> dict[str, Any]:
    """Return the policy's update with the options of its loss."""
    get = arguments.get
    kind = get(f"{ACTOR}.policy_loss.loss_mode")
    if kind not in _NODES:
        key, fix = f"{ACTOR}.policy_loss.loss_mode", "a recipe of your own; see docs/algorithms.md"
        raise RecipeError(key, f"'{kind}' is not converted", known=_NODES, fix=fix)
    loss: dict[str, Any] = {"node": _NODES[kind], "role": "actor"}
    # verl has no dual clip with the other losses.
    loss |= {"dual_clip": get(f"{ACTOR}.clip_ratio_c")} if kind == "vanilla" else {}
    loss |= _clipping(arguments, kind)
    if entropy := get(f"{ACTOR}.entropy_coeff"):
        loss["entropy_coef"] = entropy
    return loss | _kl_in_loss(arguments) | _aggregation(arguments) | _correction(arguments)


def _clipping(arguments: Arguments, kind: str) -> dict[str, Any]:
    # Null is not the default, so clip_ratio counts only where a script sets the others to null.
    low, high = (arguments.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    both = arguments.get(f"{ACTOR}.clip_ratio")
    if f"{ACTOR}.clip_ratio" in arguments.values and None not in (low, high):
        remark = "verl does not use it: clip_ratio_low and clip_ratio_high count"
        arguments.note(f"{ACTOR}.clip_ratio={both}", f"{remark} (versions before 0.4 use it for both)")
    low, high = (both if side is None else side for side in (low, high))
    # CISPO's lower bound of the ratio is 1 - low.
    is_bounded = low < 1 if kind == "cispo" else low != 0.2 or kind != "vanilla"
    options = {"clip_eps": low} if is_bounded else {}
    return options | ({"clip_eps_high": high} if high != low or kind != "vanilla" else {})


def _correction(arguments: Arguments) -> dict[str, Any]:
    """Return the correction for the sampler, by the names of verl's versions from 0.5 on."""
    get = arguments.get
    cap, level = get(f"{ACTOR}.tis_imp_ratio_cap"), get(f"{_CORRECTION}.rollout_is")
    if isinstance(cap, int | float) and cap > 0:
        return {"correction": {"level": "token", "max_ratio": cap}}
    if level is None:
        return {}
    if get(f"{_CORRECTION}.bypass_mode"):
        arguments.note(
            f"{_CORRECTION}.rollout_is={level}", "without old_logprobs the ratio itself is that to the sampler"
        )
        return {}
    if level not in ("token", "sequence"):
        arguments.note(f"{_CORRECTION}.rollout_is={level}", "not supported; there is no correction")
        return {}
    # Either a number or two, as in "0.5_5.0".
    bound = get(f"{_CORRECTION}.rollout_is_threshold") or 2.0
    low, _, high = str(bound).rpartition("_")
    try:
        options = {"outside": "mask", "min_ratio": float(low)} if low else {}
        return {"correction": {"level": level, **options, "max_ratio": float(high)}}
    except ValueError:
        key = f"{_CORRECTION}.rollout_is_threshold"
        raise RecipeError(key, f"expected a number, got '{bound}'", fix="write the value itself") from None


def _kl_in_loss(arguments: Arguments) -> dict[str, Any]:
    get = arguments.get
    if not get(f"{ACTOR}.use_kl_loss"):
        return {}
    coefficient, kl_type = get(f"{ACTOR}.kl_loss_coef"), get(f"{ACTOR}.kl_loss_type")
    # With a plus, verl's gradient is that of k2.
    estimator = "k2" if kl_type.endswith("+") else KL_ESTIMATORS.get(kl_type)
    if estimator is None:
        arguments.note(f"{ACTOR}.kl_loss_type={kl_type}", "not supported; k3 is used")
    return {"kl_coef": coefficient, **({"kl_estimator": estimator} if estimator in ("k1", "k2") else {})}


def _aggregation(arguments: Arguments) -> dict[str, Any]:
    """Return the weights of tokens, where they are not those of the node's default."""
    get = arguments.get
    mode, kind = get(f"{ACTOR}.loss_agg_mode"), get(f"{ACTOR}.policy_loss.loss_mode")
    if mode == "seq-mean-token-sum-norm":
        length = get(f"{ACTOR}.loss_scale_factor") or get("data.max_response_length")
        return {"aggregation": "constant", "constant_length": length}
    if mode == "seq-mean-token-sum":
        return {"aggregation": "constant", "constant_length": 1}
    if mode not in AGGREGATIONS:
        arguments.note(f"{ACTOR}.loss_agg_mode={mode}", "not supported; every token has the same weight")
    aggregation = AGGREGATIONS.get(mode, "token")
    return {"aggregation": aggregation} if aggregation != {"gspo": "sequence"}.get(kind, "token") else {}
