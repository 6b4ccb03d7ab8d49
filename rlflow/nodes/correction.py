"""Between the engine that samples and the one that trains: how much each token counts where they do not agree.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from rlflow.nodes.ratio import ratio
from rlflow.nodes.responses import means_over_responses, sums_over_responses
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

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, the product over its response, or the geometric mean over its response."""
    outside: Literal["bound", "mask"] = "bound"
    """What is outside of the bounds counts as much as the bound, or nothing."""
    max_ratio: Annotated[float, Gt(0)] = 2.0
    min_ratio: Annotated[float, Ge(0)] = 0.0

    def expression(self, sampler: str) -> str:
        """Return the weight for people; ``sampler`` gives the logprobs that were sampled with."""
        of = {"token": "", "sequence": " of the response", "geometric": " of the response, geometric mean"}[self.level]
        ratio = f"(p_old / p by {sampler}{of})"
        if self.outside == "bound":
            return f"clip({ratio}, {self.min_ratio:g}, {self.max_ratio:g})"
        return f"{ratio}, 0 outside of {self.min_ratio:g} to {self.max_ratio:g}"

    def __call__(self, difference: "Tensor", rows: "Tensor") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Weights [T] from log(trainer / sampler) [T]; and metrics: the mean weight, and the share outside."""
        if self.level == "sequence":
            difference = sums_over_responses(difference, rows)
        elif self.level == "geometric":
            difference = means_over_responses(difference, rows)
        free = ratio(difference)
        bounded = free.clamp(self.min_ratio, self.max_ratio)
        outside = bounded != free
        weights = bounded if self.outside == "bound" else free.masked_fill(outside, 0.0)
        return weights, {"correction": weights, "corrected_fraction": outside.float()}
