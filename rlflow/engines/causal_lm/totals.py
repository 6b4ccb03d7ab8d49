"""The loss and the metrics of one optimizer step, summed over its passes, and the checks that nothing became NaN."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, describe_samples
from rlflow.batch.top_logprobs import loss_values
from rlflow.engines.base import TokenLoss
from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.errors import EngineError, NotFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WEIGHT = "weight"


class LossTotals:
    """The sums of one rank's passes. An engine with several ranks adds up their ``sums``.

    Nothing waits for the GPU before the sums are read, so that it is never without work between passes.
    """

    def __init__(self, loss: TokenLoss, device: "torch.device", role: str) -> None:
        self._role = role
        self._loss = loss
        self._device = device
        self._sums: dict[str, Tensor] = {}
        """Each a float64 on the device."""
        self._passes: list[_Pass] = []

    @cached_property
    def sums(self) -> dict[str, float]:
        """Return the loss, the weight, and of each metric the sum and the weight; no pass is added afterwards."""
        import torch

        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))

    def add(
        self, part: Minibatch, outputs: "Tensor", more_columns: "Mapping[str, Tensor]", share: float = 1.0
    ) -> "Tensor":
        """Add a pass over ``part`` to the sums, and return its part of the loss, to be differentiated.

        ``outputs`` [T] and ``more_columns`` come from the model. A ``share`` of 0 makes the pass count for nothing.
        The loss is NaN where an input of it is not finite, because a clipped ratio would hide that. So is every
        gradient then, on all ranks that add them up.
        """
        import torch

        tokens, rows = np.arange(len(part.weights.values)), _row_numbers(part)
        weighted = np.flatnonzero(part.weights.values)
        if 0 < len(weighted) < len(tokens):
            # Losses that sum over a response must not see tokens without weight either.
            tokens, rows = weighted, np.unique(rows[weighted], return_inverse=True)[1]
            places = to_device(weighted, self._device)
            outputs, more_columns = outputs[places], {name: column[places] for name, column in more_columns.items()}
        arrays = {name: loss_values(column.values[tokens]) for name, column in part.columns.items()}
        given = {name: to_device(array, self._device) for name, array in arrays.items()}
        columns = {**given, **more_columns, "rows": to_device(rows, self._device)}
        weights = to_device(part.weights.values[tokens], self._device)
        losses, metrics = self._loss(outputs, columns)
        weights = weights * share
        total = (losses * weights).sum()
        inputs = {"the model's outputs": outputs, **columns} if len(weighted) and share else {}
        kept = _Pass(part, tokens, losses.detach(), {name: column.detach() for name, column in inputs.items()})
        self._passes.append(kept)
        total = total * torch.where(kept.is_finite(total.detach()), 1.0, nan)
        self._add("loss", total)
        self._add(_WEIGHT, weights.sum())
        for name, values in metrics.items():
            known = ~values.isnan()
            self._add(name, torch.where(known, values.detach() * weights, 0.0).sum())
            self._add(_weight_name(name), torch.where(known, weights, 0.0).sum())
        return total

    def check(
        self, loss: float, gather: "Callable[[str | None], Iterable[str | None]]" = lambda problem: [problem]
    ) -> None:
        """Raise NotFiniteError if ``loss``, the sum over all ranks, is not finite.

        ``gather`` returns the problems of all ranks from this rank's problem, so that all raise the same error.
        """
        if not isfinite(loss):
            problem = next((text for kept in self._passes if (text := kept.describe_not_finite())), None)
            where = next((problem for problem in gather(problem) if problem), "")
            raise NotFiniteError(f"role {self._role}: the loss is {loss}{where}.")

    def _add(self, name: str, value: "Tensor") -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass, for a message about values of it that are not finite."""

    part: Minibatch
    tokens: NDArray[np.int64]
    """[T]: the places of the losses among all response tokens of ``part``."""
    losses: "Tensor"
    """[T]"""
    inputs: "Mapping[str, Tensor]"
    """[T]: what the loss was computed from."""

    def is_finite(self, total: "Tensor") -> "Tensor":
        """Return whether the ``total`` of the pass and all inputs are finite: one value on the device."""
        import torch

        return torch.stack([total.isfinite(), *(column.isfinite().all() for column in self.inputs.values())]).all()

    def describe_not_finite(self) -> str | None:
        """Name the samples whose loss or inputs of the loss are not finite, and these inputs."""
        finite = {name: column.isfinite() for name, column in self.inputs.items()}
        broken = {name: ~(column.all(1) if column.dim() > 1 else column) for name, column in finite.items()}
        bad = ~self.losses.isfinite()
        for is_broken in broken.values():
            bad = bad | is_broken
        places = self.tokens[bad.cpu().numpy()]
        if not len(places):
            return None
        offsets = self.part.response_ids.offsets
        rows = np.searchsorted(offsets, places, side="right") - 1
        causes = [name for name, is_broken in broken.items() if is_broken.any()]
        why = f"; not finite there: {', '.join(causes)}" if causes else ""
        where = f"{describe_samples(self.part.keys[np.unique(rows)])}; first at token {places[0] - offsets[rows[0]]}"
        return f" at {len(places)} of {len(self.losses)} tokens of a pass ({where}){why}"


def _row_numbers(part: Minibatch) -> NDArray[np.int64]:
    lengths = part.response_ids.lengths
    return np.repeat(np.arange(len(lengths)), lengths)


def weighted_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the loss, and the mean of each metric over the tokens that have it, weighted as in the loss."""
    names = [name for name in sums if name != "loss" and _weight_name(name) in sums]
    # The sum of a metric without any weight is 0, and so is its mean.
    return {"loss": sums["loss"], **{name: sums[name] / (sums[_weight_name(name)] or 1.0) for name in names}}


def _weight_name(metric: str) -> str:
    return f"{_WEIGHT} of {metric}"


def check_finite(role: str, weights: "Iterable[tuple[str, Tensor]]", when: str) -> None:
    """Raise EngineError naming the first weight that is not finite; ``when`` says at which point, in the message.

    Each weight is read once, without a copy, and the GPU is synchronized once.
    """
    import torch

    extremes: dict[str, Tensor] = {}
    for name, weight in weights:
        if weight.numel() and weight.is_floating_point():
            # Both extremes are NaN where any value is.
            extremes[name] = torch.stack(torch.aminmax(weight.detach()))
    if not extremes:
        return
    finite = torch.stack([pair.float() for pair in extremes.values()]).isfinite().all(dim=1).tolist()
    if broken := [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]:
        and_more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise EngineError(
            f"role {role}: {broken[0]}{and_more} of {len(finite)} weights are not finite {when}, and are not used.\n"
            f"  Fix: if training caused this, start a new run with a lower roles.{role}.optimizer.learning_rate."
        )
