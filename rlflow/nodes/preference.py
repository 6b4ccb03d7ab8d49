"""Of two responses to a prompt, which one is preferred: what its losses and figures have in common.

Shapes: P pairs, T response tokens of a micro-batch, which has both responses of each of its pairs next to each other.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from rlflow.batch import Pairs
from rlflow.nodes.responses import sums_over_responses
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Preference(Section):
    """A kind of node that trains on pairs derives from this and from Node."""

    num_minibatches: Annotated[int, Ge(1)] = 1
    """Optimizer steps that the pairs are divided among."""

    @abstractmethod
    def scores(self, engine: Any, pairs: Pairs, **inputs: Any) -> NDArray[np.float32]:
        """[2 P]: a number for each response, larger for one that is preferred. The parameters are those of ``run``."""

    def accuracy(self, engine: Any, pairs: Pairs, **inputs: Any) -> float:
        """The share of pairs whose chosen response has the larger score. A tie counts half."""
        scores = self.scores(engine, pairs, **inputs)
        return float(np.mean((1 + np.sign(scores[0::2] - scores[1::2])) / 2))


def margins(values: "Tensor", rows: "Tensor") -> "Tensor":
    """[T]: for each token the sum of ``values`` [T] over its pair's chosen response, minus that over the rejected one.

    ``rows`` [T] are the numbers of responses in the micro-batch: even ones are chosen.
    """
    return sums_over_responses(values * (1 - 2 * (rows % 2)), rows // 2)


def preference_loss(margin: "Tensor", label_smoothing: float = 0.0) -> "tuple[Tensor, Mapping[str, Tensor]]":
    """[T], from the margins [T] of each token's pair: -log sigmoid(margin), and metrics.

    With ``label_smoothing`` e it is -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).
    Source: Bradley and Terry 1952, as in InstructGPT (arXiv 2203.02155), equation 1.
    """
    # -log sigmoid(m) = log(1 + exp(-m)), and -log sigmoid(-m) is larger by m.
    loss = (-margin).logaddexp(margin.new_zeros(())) + label_smoothing * margin
    return loss, {"accuracy": (1 + margin.sign()) / 2, "margin": margin}
