"""What may have adapters."""

from collections.abc import Set

from rlflow.errors import GraphError
from rlflow.resources.models.architecture import Architecture

_CAPABILITIES = {"Trains", "Scores"}


def check_lora(path: str, trained: bool, capabilities: Set[str], model: Architecture | None) -> None:
    """Of the role at ``path``. Raises GraphError where it is not trained, where more is new in it than the adapters,
    and for experts, whose weights are no linear layers."""
    others = capabilities - _CAPABILITIES
    if not trained:
        fact, fix = "the role is never trained", "remove it; a role that follows has the adapters of the one before it"
    elif others:
        fact, fix = (
            f"the role's engine is asked for {', '.join(sorted(others))}, whose head has no adapter",
            "remove it",
        )
    elif model is not None and model.num_experts:
        fact, fix = f"a {model.model_type} has experts, and these have no adapters", "remove it"
    else:
        return
    raise GraphError(f"{path}.lora", fact, fix=fix)
