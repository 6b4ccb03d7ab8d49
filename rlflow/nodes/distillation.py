"""Distillation from the likeliest words of teachers, on the policy's own responses or on those of the data.

Shapes: B rollouts, T response tokens of a micro-batch, K words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from rlflow.batch import Metrics, Packed, Rollouts, Sequences, TopLogprobs
from rlflow.engines.base import Entropy, ScoresTop, TrainsLogprobs
from rlflow.errors import GraphError
from rlflow.nodes.base import Formula, Headline, Node, NodeView
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.schema import Count, Section

if TYPE_CHECKING:
    from torch import Tensor

# The least probability of all other words, so that rounding errors of a sum near 1 have no logarithm.
_LEAST_REST = 1e-6


@dataclass(frozen=True, kw_only=True)
class TeacherWords(Section):
    """The options of nodes that return a teacher's likeliest words, and the rows of each of several teachers."""

    count: Annotated[Count, Le(256)] = 16
    """The number of words, K. Fewer, if the model has fewer."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data with the values, as texts, of the rows that this teacher scores: by default all."""

    def check_graph(self, view: NodeView) -> None:
        if self.rows and not any(view.generators()):
            fact = "selects rows of the data by their columns, which only rollouts keep"
            raise GraphError(f"{view.path}.rows", fact, fix="rollouts: the node that generates")

    def words_of(
        self, rollouts: Sequences, others: TopLogprobs | None, score: Callable[[Sequences], Packed]
    ) -> TopLogprobs:
        """Return the words of ``others``, and for the rows of this teacher those that ``score`` returns as records."""
        is_mine = np.ones(len(rollouts), np.bool_)
        if isinstance(rollouts, Rollouts) and self.rows:
            chosen = (all(str(row.get(name)) == value for name, value in self.rows.items()) for row in rollouts.rows)
            is_mine = np.fromiter(chosen, np.bool_)
        mine = np.flatnonzero(is_mine)
        # A model needs a row, also if none is its own. What others keep for the rows of no teacher is never read.
        scores = score(rollouts.take(mine if len(mine) else np.array([0])))
        places, is_scored = np.zeros(len(rollouts), np.int64), is_mine
        if others is not None:
            places, is_scored = np.arange(len(rollouts)), is_mine | others.is_scored
            scores = Packed.concatenate([scores, others.values])
            places += len(scores) - len(rollouts)
        places[mine] = np.arange(len(mine))
        return TopLogprobs(values=scores.take(places), is_scored=is_scored)


@dataclass(frozen=True, kw_only=True)
class ScoreTopLogprobs(TeacherWords, Node, kind="top_logprobs", unit="sample"):
    """The likeliest words of the role's model in the place of every response token, with their logprobs.

    Several teachers are a chain: each has a node that scores the responses to its ``rows``, and reads as ``others`` the
    node of the teacher before it.
    """

    def run(self, engine: ScoresTop, rollouts: Sequences, others: TopLogprobs | None = None) -> TopLogprobs:
        temperature = rollouts.temperature if isinstance(rollouts, Rollouts) else 1.0
        return self.words_of(rollouts, others, lambda mine: engine.top_logprobs(mine, temperature, self.count).values)


@dataclass(frozen=True, kw_only=True)
class DivergenceLoss:
    """A divergence of the policy from a teacher, over K words and "any other word".

    p is the teacher and q the policy: KL(p || q) with beta 0, KL(q || p) with beta 1, and in between beta KL(p || m) +
    (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. Columns: ``teacher`` and ``word_logprobs``.
    Source: GKD (arXiv 2306.13649), section 2.
    """

    beta: float
    temperature: float
    entropy: Entropy = "reported"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the divergence at each token [T], and metrics."""
        teacher, policy = columns["teacher"], columns["word_logprobs"]
        rests = [(1 - words.exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST).log() for words in (teacher, policy)]
        divergence = self._sum(teacher, policy) + self._sum(*rests)
        return divergence, {"covered": teacher.exp().sum(1), "entropy": columns["entropy"]}

    def _sum(self, log_p: "Tensor", log_q: "Tensor") -> "Tensor":
        """Return the part of the divergence [T] that comes from some words, [T, K] each."""
        if self.beta == 0:
            return _kl(log_p, log_q)
        if self.beta == 1:
            return _kl(log_q, log_p)
        log_m = (log_p + log(self.beta)).logaddexp(log_q + log(1 - self.beta))
        return self.beta * _kl(log_p, log_m) + (1 - self.beta) * _kl(log_q, log_m)


def _kl(log_p: "Tensor", log_q: "Tensor") -> "Tensor":
    return (log_p.exp() * (log_p - log_q)).sum(1)


@dataclass(frozen=True, kw_only=True)
class DistillUpdate(Node, kind="distill_update", unit="batch"):
    """Train on a divergence from the teachers' likeliest words. Every token of a scored response has the same weight.

    With ``rollouts: examples`` the responses are those of the data.
    """

    headline: ClassVar[Headline | None] = Headline("loss", ".4f", label="divergence", is_learned=True)

    beta: Annotated[float, Ge(0), Le(1)] = 0.0
    """The divergence: 0 is the forward KL, 1 the reverse KL, and in between Jensen-Shannon's."""
    num_minibatches: Count = 1
    """The number of optimizer steps that the responses are divided among."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        names = {0.0: "KL(p_teacher || p)", 1.0: "KL(p || p_teacher)"}
        term = names.get(self.beta, f"{self.beta:g} KL(p_teacher || m) + {1 - self.beta:g} KL(p || m)")
        where = {} if self.beta in names else {"m": f"{self.beta:g} p_teacher + {1 - self.beta:g} p"}
        teacher = f"the likeliest words by {symbols['teacher']}, and any other word"
        expression = f"{Weighting().expression('responses')} of [{term}]"
        return Formula(symbol="L", expression=expression, where={**where, "p_teacher": teacher})

    def run(self, engine: TrainsLogprobs, rollouts: Sequences, teacher: TopLogprobs) -> Metrics:
        temperature, is_trained = 1.0, teacher.is_scored
        if isinstance(rollouts, Rollouts):
            temperature, is_trained = rollouts.temperature, teacher.is_scored & ~rollouts.failed
        rows = np.flatnonzero(is_trained)
        steps = train(
            engine,
            rollouts.take(rows),
            {"teacher": teacher.values.take(rows)},
            DivergenceLoss(beta=self.beta, temperature=temperature),
            OptimizerSteps(num_minibatches=self.num_minibatches),
        )
        return Metrics(values=mean_metrics(steps) | {"scored": float(is_trained.mean())})
