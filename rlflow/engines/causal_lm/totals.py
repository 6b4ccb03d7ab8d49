"""What training minimises and measures, in sums over the passes of one optimizer step."""

from collections import defaultdict
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, Packed, named_samples
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
        self._loss = loss
        self._device = device
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, part: Minibatch, outputs: "Tensor", more: "Mapping[str, Tensor]", share: float = 1.0) -> "Tensor":
        """What a pass over ``part`` adds to the loss, to be differentiated.

        ``outputs`` [T] are the model's, and ``more`` what it says besides; a ``share`` of 0: the pass counts nothing.
        Raises EngineError for a loss that is not finite.
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
        if not isfinite(value := float(total.detach())):
            raise self._not_finite(value, losses, {"the model's outputs": outputs, **columns}, part.keys, rows)
        self.sums["loss"] += value
        self.sums[_WEIGHT] += float(weights.sum())
        for name, values in metrics.items():
            known = ~values.isnan()
            self.sums[name] += float((values.detach() * weights)[known].sum())
            self.sums[_weight_of(name)] += float(weights[known].sum())
        return total

    def _not_finite(
        self, value: float, losses: "Tensor", read: "Mapping[str, Tensor]", keys: NDArray[np.int64], rows: "Tensor"
    ) -> EngineError:
        """Return the error that names the samples, and which of what the loss has ``read`` is not finite either."""
        bad = ~losses.detach().isfinite()
        samples = keys[np.unique(rows[bad].cpu().numpy())]
        causes = [name for name, column in read.items() if not column.detach()[bad].isfinite().all()]
        why = f" Not finite there: {', '.join(causes)}." if causes else ""
        where = f" at {int(bad.sum())} of {len(bad)} tokens ({named_samples(samples)})" if len(samples) else ""
        return EngineError(f"role {self._role}: the loss is {value}{where}.{why}")

    def _rows(self, part: Minibatch) -> "Tensor":
        import torch

        lengths = part.response_ids.lengths
        return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(self._device)

    def _tensor(self, column: Packed) -> "Tensor":
        import torch

        return torch.from_numpy(column.values).to(self._device)


def averaged_over_weights(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the loss, and the mean of each metric over the tokens that have it, weighted as in the loss."""
    names = [name for name in sums if name != "loss" and _weight_of(name) in sums]
    # Where nothing counts, nothing was measured.
    return {"loss": sums["loss"], **{name: sums[name] / (sums[_weight_of(name)] or 1.0) for name in names}}


def _weight_of(metric: str) -> str:
    return f"{_WEIGHT} of {metric}"
