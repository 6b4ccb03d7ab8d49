"""Finding weights that are NaN or infinite before anything is made of them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


def check_finite(role: str, weights: "Iterable[tuple[str, Tensor]]", when: str) -> None:
    """Raise EngineError for the first weight that is not finite, by its name; ``when`` follows it in the message.

    Each weight is read once, nothing is copied, and a GPU is waited for once.
    """
    import torch

    extremes: dict[str, Tensor] = {}
    for name, weight in weights:
        if weight.numel() and weight.is_floating_point():
            # Both are NaN where any value is.
            extremes[name] = torch.stack(torch.aminmax(weight.detach()))
    if not extremes:
        return
    finite = torch.stack([pair.float() for pair in extremes.values()]).isfinite().all(dim=1).tolist()
    if broken := [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise EngineError(
            f"role {role}: {broken[0]}{others} of {len(finite)} weights {when} not finite, and are not used.\n"
            f"  Fix: if training broke them, a lower roles.{role}.optimizer.learning_rate, with a new run."
        )
