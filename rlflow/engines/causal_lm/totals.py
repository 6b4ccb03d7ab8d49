"""What training minimises and measures, in sums over the passes of one optimizer step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, Packed, describe_samples
from rlflow.engines.base import TokenLoss
from rlflow.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WEIGHT = "weight"


class Totals:
    """Of one rank's passes: whoever has shares of several ranks adds their ``sums`` up."""

    def __init__(self, loss: TokenLoss, device: "torch.device", role: str) -> None:
        self._role = role
        self._problem: str | None = None
        """Describes the values that were not finite in the first pass without a finite loss."""
        self._loss = loss
        self._device = device
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, part: Minibatch, outputs: "Tensor", more: "Mapping[str, Tensor]", share: float = 1.0) -> "Tensor":
        """What a pass over ``part`` adds to the loss, to be differentiated.

        ``outputs`` [T] are the model's, and ``more`` what it says besides; a ``share`` of 0: the pass counts nothing.
        """
        import torch

        columns = {name: self._tensor(column) for name, column in part.columns.items()}
        rows = self._rows(part)
        columns = {**columns, **more, "rows": rows}
        weights = self._tensor(part.weights)
        counting = np.flatnonzero(part.weights.values)
        if 0 < len(counting) < len(weights):
            # What counts nothing is not there: not in what is summed up over a response either.
            places = torch.from_numpy(counting).to(self._device)
            outputs, weights = outputs[places], weights[places]
            columns = {name: column[places] for name, column in columns.items()}
            rows = columns["rows"]
            columns["rows"] = torch.unique(rows, return_inverse=True)[1]
        losses, metrics = self._loss(outputs, columns)
        weights = weights * share
        total = (losses * weights).sum()
        value = float(total.detach())
        if not isfinite(value) and self._problem is None:
            self._problem = _not_finite(losses, {"the model's outputs": outputs, **columns}, part.keys, rows)
        self.sums["loss"] += value
        self.sums[_WEIGHT] += float(weights.sum())
        for name, values in metrics.items():
            known = ~values.isnan()
            self.sums[name] += float((values.detach() * weights)[known].sum())
            self.sums[_weight_of(name)] += float(weights[known].sum())
        return total

    def check(self, loss: float, said_by: "Callable[[str | None], Iterable[str | None]]" = lambda own: [own]) -> None:
        """Raise EngineError for a ``loss``, of all ranks together, that is not finite.

        ``said_by`` gives from what this rank says of it what all ranks say: they raise the same error.
        """
        if not isfinite(loss):
            where = next((each for each in said_by(self._problem) if each), "")
            raise EngineError(f"role {self._role}: the loss is {loss}{where}.")

    def _rows(self, part: Minibatch) -> "Tensor":
        import torch

        lengths = part.response_ids.lengths
        return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(self._device)

    def _tensor(self, column: Packed) -> "Tensor":
        import torch

        return torch.from_numpy(column.values).to(self._device)


def _not_finite(losses: "Tensor", read: "Mapping[str, Tensor]", keys: NDArray[np.int64], rows: "Tensor") -> str | None:
    """Return which samples have a loss that is not finite, and which of what the loss has ``read`` is not, either."""
    bad = ~losses.detach().isfinite()
    samples = keys[np.unique(rows[bad].cpu().numpy())]
    causes = [name for name, column in read.items() if not column.detach()[bad].isfinite().all()]
    why = f"; not finite there: {', '.join(causes)}" if causes else ""
    where = f" at {int(bad.sum())} of {len(bad)} tokens of a pass ({describe_samples(samples)})"
    return f"{where}{why}" if len(samples) else None


def averaged_over_weights(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the loss, and the mean of each metric over the tokens that have it, weighted as in the loss."""
    names = [name for name in sums if name != "loss" and _weight_of(name) in sums]
    # Where nothing counts, nothing was measured.
    return {"loss": sums["loss"], **{name: sums[name] / (sums[_weight_of(name)] or 1.0) for name in names}}


def _weight_of(metric: str) -> str:
    return f"{_WEIGHT} of {metric}"
