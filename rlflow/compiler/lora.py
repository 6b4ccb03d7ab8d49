"""What may have adapters, and what must."""

from collections.abc import Set

from rlflow.errors import GraphError
from rlflow.recipe import Role
from rlflow.resources.models.architecture import Architecture

_BASE = "ScoresBase"
# Of language models. Other heads are new, and would have to be trained besides.
_CAPABILITIES = {"Trains", "Scores", _BASE}


def check_lora(path: str, role: Role, trained: bool, capabilities: Set[str], model: Architecture | None) -> None:
    """Of the role at ``path``. Raises GraphError where there are adapters that nobody trains or that are not enough,
    and where there are none and a node asks for the model without them."""
    others = sorted(capabilities - _CAPABILITIES)
    fix = "remove it"
    if role.lora is None:
        if _BASE not in capabilities:
            return
        fact = "is missing, and a node asks for what the role's model says without its adapters"
        fix = f"{path}.lora={{}}, or node: logprobs with a role of its own"
    elif not trained:
        fact, fix = "the role is never trained", "remove it; a role that follows has the adapters of the one before it"
    elif others:
        fact = f"the role's engine is asked for {', '.join(others)}, whose head has no adapter"
    elif model is not None and model.num_experts:
        fact = f"a {model.model_type} has experts, and these have no adapters"
    else:
        return
    raise GraphError(f"{path}.lora", fact, fix=fix)
