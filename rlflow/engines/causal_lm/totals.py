"""The loss and the metrics of one optimizer step, summed over its passes, and the checks that nothing became NaN."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, Packed, describe_samples
from rlflow.engines.base import TokenLoss
from rlflow.errors import EngineError, NotFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WEIGHT = "weight"


class LossTotals:
    """The sums of one rank's passes. An engine with several ranks adds up their ``sums``."""

    def __init__(self, loss: TokenLoss, device: "torch.device", role: str) -> None:
        self._role = role
        self._problem: str | None = None
        """A description of the values that were not finite, from the first pass without a finite loss."""
        self._loss = loss
        self._device = device
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(
        self, part: Minibatch, outputs: "Tensor", more_columns: "Mapping[str, Tensor]", share: float = 1.0
    ) -> "Tensor":
        """Add a pass over ``part`` to the sums, and return its part of the loss, to be differentiated.

        ``outputs`` [T] and ``more_columns`` come from the model. A ``share`` of 0 makes the pass count for nothing.
        The loss is NaN where an input of it is not finite, because a clipped ratio would hide that. So is every
        gradient then, on all ranks that add them up.
        """
        import torch

        columns = {name: self._to_tensor(column) for name, column in part.columns.items()}
        columns = {**columns, **more_columns, "rows": self._row_numbers(part)}
        weights = self._to_tensor(part.weights)
        weighted = np.flatnonzero(part.weights.values)
        tokens = np.arange(len(weights))
        if 0 < len(weighted) < len(weights):
            tokens = weighted
            # Losses that sum over a response must not see tokens without weight either.
            places = torch.from_numpy(weighted).to(self._device)
            outputs, weights = outputs[places], weights[places]
            columns = {name: column[places] for name, column in columns.items()}
            columns["rows"] = torch.unique(columns["rows"], return_inverse=True)[1]
        losses, metrics = self._loss(outputs, columns)
        weights = weights * share
        total = (losses * weights).sum()
        inputs = {"the model's outputs": outputs, **columns} if len(weighted) and share else {}
        # The GPU is synchronized once.
        value, *broken = torch.stack([total.detach().double(), *_count_not_finite(inputs.values())]).tolist()
        if not isfinite(value) or any(broken):
            self._problem = self._problem or _describe_not_finite(losses, inputs, part, tokens)
            value, total = nan, total * nan
        self.sums["loss"] += value
        self.sums[_WEIGHT] += float(weights.sum())
        for name, values in metrics.items():
            known = ~values.isnan()
            self.sums[name] += float((values.detach() * weights)[known].sum())
            self.sums[_weight_name(name)] += float(weights[known].sum())
        return total

    def check(
        self, loss: float, gather: "Callable[[str | None], Iterable[str | None]]" = lambda problem: [problem]
    ) -> None:
        """Raise NotFiniteError if ``loss``, the sum over all ranks, is not finite.

        ``gather`` returns the problems of all ranks from this rank's problem, so that all raise the same error.
        """
        if not isfinite(loss):
            where = next((problem for problem in gather(self._problem) if problem), "")
            raise NotFiniteError(f"role {self._role}: the loss is {loss}{where}.")

    def _row_numbers(self, part: Minibatch) -> "Tensor":
        import torch

        lengths = part.response_ids.lengths
        return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(self._device)

    def _to_tensor(self, column: Packed) -> "Tensor":
        import torch

        return torch.from_numpy(column.values).to(self._device)


def _count_not_finite(columns: "Iterable[Tensor]") -> "list[Tensor]":
    return [column.detach().isfinite().logical_not().sum() for column in columns]


def _describe_not_finite(
    losses: "Tensor", inputs: "Mapping[str, Tensor]", part: Minibatch, tokens: NDArray[np.int64]
) -> str | None:
    """Name the samples whose loss or inputs of the loss are not finite, and these inputs.

    ``tokens`` are the places of the losses among all response tokens of ``part``.
    """
    broken = {name: ~column.detach().isfinite() for name, column in inputs.items()}
    bad = ~losses.detach().isfinite()
    for is_broken in broken.values():
        bad = bad | is_broken
    places = tokens[bad.cpu().numpy()]
    if not len(places):
        return None
    offsets = part.response_ids.offsets
    rows = np.searchsorted(offsets, places, side="right") - 1
    causes = [name for name, is_broken in broken.items() if is_broken.any()]
    why = f"; not finite there: {', '.join(causes)}" if causes else ""
    where = f"{describe_samples(part.keys[np.unique(rows)])}; first at token {places[0] - offsets[rows[0]]}"
    return f" at {len(places)} of {len(losses)} tokens of a pass ({where}){why}"


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
