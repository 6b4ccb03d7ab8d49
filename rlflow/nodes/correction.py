"""Between the engine that samples and the one that trains: how much each token counts where they do not agree.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from rlflow.nodes.responses import sums_over_responses
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Correction(Section):
    """The ratio of the trainer's probability, before the update, to the sampler's, within bounds: an importance weight.

    Source: with ``level: token, outside: bound`` TIS (https://fengyao.notion.site/off-policy-rl); with ``token`` and
    ``mask`` IcePop (arXiv 2510.18855); with ``sequence`` and ``mask`` masked importance sampling, where
    the ratio is that of whole responses (https://richardli.xyz/rl-collapse).
    """

    level: Literal["token", "sequence"] = "token"
    """Of each token, or the product over its response."""
    outside: Literal["bound", "mask"] = "bound"
    """What is outside of the bounds counts as much as the bound, or nothing."""
    max_ratio: Annotated[float, Gt(0)] = 2.0
    min_ratio: Annotated[float, Ge(0)] = 0.0

    def __call__(self, difference: "Tensor", rows: "Tensor") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Weights [T] from log(trainer / sampler) [T]; and metrics: the mean weight, and the share outside."""
        if self.level == "sequence":
            difference = sums_over_responses(difference, rows)
        ratio = difference.exp()
        bounded = ratio.clamp(self.min_ratio, self.max_ratio)
        outside = bounded != ratio
        weights = bounded if self.outside == "bound" else ratio.masked_fill(outside, 0.0)
        return weights, {"correction": weights, "corrected_fraction": outside.float()}
