"""Direct preference optimization.

Shapes: P pairs, T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Metrics, Pairs
from rlflow.engines.base import Scores, TokenLoss, TrainsLogprobs
from rlflow.nodes.base import Node
from rlflow.nodes.formula import Formula, times
from rlflow.nodes.preference import Preference, margins, preference_loss
from rlflow.nodes.training import Weighting, averaged, train

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DpoLoss:
    """-log sigmoid(beta (d_chosen - d_rejected)), d = log(policy / reference) of a whole response.

    Each token has the loss of its pair. Columns: ``reference`` and ``rows``. Source: arXiv 2305.18290, equation 7.
    """

    beta: float
    label_smoothing: float = 0.0
    temperature: float = 1.0

    @property
    def expression(self) -> str:
        """The loss for people; m is the margin before it is scaled."""
        sides = [(1 - self.label_smoothing, "m"), (self.label_smoothing, "(-m)")]
        terms = [times(share, f"log sigmoid({times(self.beta, side)})") for share, side in sides if share]
        return f"-{' - '.join(terms)}"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        margin = self.beta * margins(logprobs - columns["reference"], columns["rows"])
        return preference_loss(margin, self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class DpoUpdate(Preference, Node, kind="dpo_update", unit="batch"):
    """Every pair counts the same. The metric ``margin`` is that of the implicit rewards, beta log(policy / reference),
    and ``accuracy`` the share of pairs in which it is above 0."""

    beta: Annotated[float, Gt(0)] = 0.1
    """How much staying near the reference counts."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """The share of pairs whose labels are taken to be wrong (https://ericmitchell.ai/cdpo.pdf)."""

    def loss(self) -> TokenLoss:
        """Return the loss of one pair's tokens, which has the column ``reference``."""
        return DpoLoss(beta=self.beta, label_smoothing=self.label_smoothing)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {
            "m": "d of the chosen response - d of the rejected one",
            "d": "sum over the response of log(p / p_ref)",
            "p_ref": f"p by {symbols['reference']}",
        }
        loss = self.loss()
        term = getattr(loss, "expression", f"{type(loss).__name__}(m)")
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where=where)

    def run(self, engine: TrainsLogprobs, pairs: Pairs, reference: Logprobs) -> Metrics:
        steps = train(
            engine,
            pairs,
            {"reference": reference.values},
            self.loss(),
            num_minibatches=self.num_minibatches,
            # The tokens of a response count 1 / (2 P) together, and those of a pair, which have one loss, 1 / P.
            weighting=Weighting(aggregation="sequence"),
        )
        return Metrics(values=averaged(steps))

    def scores(self, engine: Scores, pairs: Pairs, reference: Logprobs) -> NDArray[np.float32]:  # type: ignore[override]
        """The implicit rewards, over beta."""
        own = engine.logprobs(pairs, 1.0).values
        differences = own.values.astype(np.float64) - reference.values.values
        return np.add.reduceat(differences, own.offsets[:-1]).astype(np.float32)
