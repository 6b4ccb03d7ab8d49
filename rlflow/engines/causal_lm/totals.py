"""What training minimises and measures, in sums over the passes of one optimizer step."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlflow.batch import Minibatch, Packed
from rlflow.engines.base import TokenLoss

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WEIGHT = "weight"


class Totals:
    """Of one rank's passes: whoever has shares of several ranks adds their ``sums`` up."""

    def __init__(self, loss: TokenLoss, device: "torch.device") -> None:
        self._loss = loss
        self._device = device
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, part: Minibatch, outputs: "Tensor", more: "Mapping[str, Tensor]", share: float = 1.0) -> "Tensor":
        """What a pass over ``part`` adds to the loss, to be differentiated.

        ``outputs`` [T] are the model's, and ``more`` what it says besides; a ``share`` of 0: the pass counts nothing.
        """
        import torch

        columns = {name: self._tensor(column) for name, column in part.columns.items()}
        columns = {**columns, **more, "rows": self._rows(part)}
        weights = self._tensor(part.weights)
        counting = np.flatnonzero(part.weights.values)
        if 0 < len(counting) < len(weights):
            # What counts nothing is not there: not in what is summed up over a response either.
            places = torch.from_numpy(counting).to(self._device)
            outputs, weights = outputs[places], weights[places]
            columns = {name: column[places] for name, column in columns.items()}
            columns["rows"] = torch.unique(columns["rows"], return_inverse=True)[1]
        losses, metrics = self._loss(outputs, columns)
        weights = weights * share
        total = (losses * weights).sum()
        self.sums["loss"] += float(total.detach())
        self.sums[_WEIGHT] += float(weights.sum())
        for name, values in metrics.items():
            self.sums[name] += float((values.detach() * weights).sum())
        return total

    def _rows(self, part: Minibatch) -> "Tensor":
        import torch

        lengths = part.response_ids.lengths
        return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(self._device)

    def _tensor(self, column: Packed) -> "Tensor":
        import torch

        return torch.from_numpy(column.values).to(self._device)


def averaged_over_weights(sums: Mapping[str, float]) -> dict[str, float]:
    """The loss, and the mean of all that was measured, each token counting as it does in the loss."""
    # Where nothing counts, nothing was measured.
    weight = sums[_WEIGHT] or 1.0
    means = {name: value / weight for name, value in sums.items() if name not in ("loss", _WEIGHT)}
    return {"loss": sums["loss"], **means}
