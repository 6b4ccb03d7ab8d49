"""Muon: momentum whose singular values are made equal, for the matrices of a model's layers (Jordan et al. 2024).

Shapes: a weight is [..., R, C]. The last two dimensions are a matrix, the first one, if any, counts experts.
"""

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import AdamW, Optimizer

from rlflow.recipe import Optimizer as Options

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

_MOMENTUM = 0.95
# Five steps of a polynomial bring singular values between 0.7 and 1.2 (https://kellerjordan.github.io/posts/muon/).
_STEPS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
# The root mean square of AdamW's usual update, to which updates are scaled (Liu et al. 2025, arXiv:2502.16982), so that
# both kinds of weights take one learning rate.
_UPDATE_RMS = 0.2


class Muon(Optimizer):
    """Muon for groups of matrices, and AdamW for all others.

    The state of a matrix has one moment, ``exp_avg``. That of another weight is AdamW's.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], options: Options) -> None:
        """Take groups of weights. ``matrices`` of a group says whether they are matrices."""
        super().__init__([group for group in groups if group["matrices"]], {"lr": options.learning_rate})
        others = [group for group in groups if not group["matrices"]]
        self._adamw = AdamW(others, options.learning_rate, options.betas, weight_decay=options.weight_decay, fused=True)
        self._matrices, self._weight_decay = list(self.param_groups), options.weight_decay
        # They share state and groups, so that others see one optimizer.
        self._adamw.state = self.state
        self.param_groups = [*self._matrices, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients of all weights that have one."""
        self._adamw.step()
        for group in self._matrices:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_of(weight, group["lr"])

    def _step_of(self, weight: "Parameter", learning_rate: float) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight)}
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(gradient, 1 - _MOMENTUM)
        ahead = gradient.lerp(momentum, _MOMENTUM)  # Nesterov's momentum
        scale = _UPDATE_RMS * sqrt(max(weight.shape[-2:]))
        weight.mul_(1 - learning_rate * self._weight_decay)
        weight.sub_(orthogonalize(ahead), alpha=learning_rate * scale)


def is_matrix(name: str, weight: "Tensor") -> bool:
    """Return whether a weight is a matrix of a numbered layer, neither an embedding nor a head."""
    return weight.ndim >= 2 and any(part.isdecimal() for part in name.split("."))


def orthogonalize(values: "Tensor") -> "Tensor":
    """Return matrices with the singular vectors of ``values``, and singular values of about 1. All ranks call this.

    Each rank computes whole matrices. Experts stay where they are.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(values, DTensor):
        return _orthogonalize(values)
    first = values.ndim - 2
    whole = [place if isinstance(place, Shard) and place.dim < first else Replicate() for place in values.placements]
    computed = _orthogonalize(values.redistribute(placements=whole).to_local())
    return DTensor.from_local(
        computed, values.device_mesh, whole, run_check=False, shape=values.shape, stride=values.stride()
    ).redistribute(placements=values.placements)


def _orthogonalize(values: "Tensor") -> "Tensor":
    matrices = values.bfloat16() if values.is_cuda else values.float()
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    matrices = matrices.mT if is_tall else matrices
    matrices = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = matrices @ matrices.mT
        matrices = a * matrices + (b * gram + c * gram @ gram) @ matrices
    found: Tensor = (matrices.mT if is_tall else matrices).to(values.dtype)
    return found
