"""What all ways to train a policy on its rollouts have in common.

Training a role's model on the step's data, one kind of node for each surrogate.

Shapes: T response tokens of a micro-batch.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Lt

from rlflow.batch import Advantages, Examples, Logprobs, Metrics, Packed, Rollouts
from rlflow.engines.base import Trains
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import Formula, Node, Setting, defined_by, kl_expression, old_probability, times
from rlflow.nodes.kl import Estimator, check_kl, ratio
from rlflow.nodes.minibatches import Aggregation, Weighting, averaged, train
from rlflow.nodes.policy_loss import Correction, LikelihoodLoss, PolicyLoss, means_over_responses
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor

    Columns = Mapping[str, Tensor]
    Loss = tuple[Tensor, Mapping[str, Tensor]]


_OLD = "graph.old_logprobs={node: logprobs, role: actor}"


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Section):
    """A kind of node derives from this and from Node, and adds a ``surrogate`` with its options.

    Excluded rollouts are in no minibatch.
    Ratios are taken to ``old_logprobs`` where such a node is there, else to those that the engine sampled with.
    How far the two engines are apart is the metric ``sampler_difference`` (for the same weights, or with ``overcommit``
    for those of the steps that wrote the rollouts): the absolute difference of their logprobs, in the mean over the
    tokens of the first minibatch, before it changes the model. With ``old_logprobs`` it is the mean over each
    minibatch's tokens, and that of all optimizer steps.
    """

    kind: ClassVar[str]
    hints_for_other_names: ClassVar[Mapping[str, str]] = {
        "beta": "kl_coef",
        "kl_loss_coef": "kl_coef",
        "kl_loss_type": "kl_estimator: k1, k2 or k3",
        "entropy_coeff": "entropy_coef",
        "loss_agg_mode": "aggregation: token, sequence or constant",
        "loss_type": "aggregation: token, sequence or constant",
        "ppo_epochs": "num_epochs",
        "num_iterations": "num_epochs",
        "ppo_mini_batch_size": "num_minibatches, the number of them",
        "mask_truncated_completions": "skip_truncated",
        "tis": f"{_OLD} and correction: {{level: token, outside: bound, max_ratio: 2}}",
        "tis_imp_ratio_cap": f"{_OLD} and correction: {{level: token, outside: bound, max_ratio: 2}}",
        "icepop": f"{_OLD} and correction: {{level: token, outside: mask, min_ratio: 0.5, max_ratio: 5}}",
    }

    aggregation: Aggregation = "token"
    """What counts the same within a minibatch: every ``token``, every ``sequence``, or every token over a ``constant``.
    """
    constant_length: Annotated[int, Ge(1)] | None = None
    """Of ``constant``: the tokens that each response is taken to have."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Of the KL divergence in the loss. Needs a ``reference``."""
    kl_estimator: Estimator = "k3"
    kl_target: Annotated[float, Gt(0)] | None = None
    """Nats a token, which ``kl_coef``, then where it begins, is adapted to from step to step."""
    entropy_coef: Annotated[float, Ge(0)] = 0.0
    """Of the entropy, which the loss makes larger."""
    correction: Correction | None = None
    """For what the sampling engine computes otherwise. Needs ``old_logprobs``."""
    skip_truncated: bool = False
    """Responses that were cut at the limit are not trained on (DAPO's overlong filtering)."""
    critic_warmup: Annotated[int, Ge(0)] = 0
    """Steps in which the policy stays as it is, its rate 0, while a critic learns what to expect of it. The schedule of
    the rate begins after them."""
    num_minibatches: Annotated[int, Ge(1)] = 1
    """Optimizer steps that the rollouts are divided among."""
    num_epochs: Annotated[int, Ge(1)] = 1

    @abstractmethod
    def surrogate(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The loss [T] and metrics [T], of the model's logprobs [T] and columns: see PolicyLoss."""

    def surrogate_formula(self, advantage: str) -> Formula:
        """Return the surrogate of one token for people, w being the ratio; ``advantage`` is the advantage's symbol."""
        return Formula(symbol="L", expression=f"{self.kind}(w, {advantage})", where={"w": "p / p_old"})

    def loss(self, temperature: float) -> PolicyLoss:
        return PolicyLoss(
            surrogate=self.surrogate,
            temperature=temperature,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            correction=self.correction,
        )

    def check(self, connected: frozenset[str]) -> None:
        check_kl(self.kl_coef, self.kl_target, connected)
        if self.correction is not None and "old_logprobs" not in connected:
            raise GraphError(
                "correction",
                "asks for the logprobs of the role that is trained, and no node 'old_logprobs' gives them",
                fix="add old_logprobs: {node: logprobs, role: actor}, or correction: null",
            )
        if self.correction is not None and self.correction.min_ratio > self.correction.max_ratio:
            fact = f"{self.correction.min_ratio:g} is more than max_ratio, which is {self.correction.max_ratio:g}"
            raise RecipeError("correction.min_ratio", fact, fix="less")
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise GraphError(
                "constant_length",
                f"is {self.constant_length}, and aggregation is '{self.aggregation}'",
                fix="both aggregation: constant and a constant_length, or neither",
            )

    def cautions(self, setting: Setting) -> Iterator[str]:
        if self.kl_coef and self.kl_estimator == "k1":
            yield "kl_estimator: in a loss the gradient of k1 is zero on average, so it does nothing; use k2 or k3"
        # In float32 engines agree to about 1e-6, which no bound of a ratio is near to.
        if setting.samplers and setting.dtype != "float32" and "old_logprobs" not in setting.connected:
            yield from self.mismatch_cautions(setting)

    def mismatch_cautions(self, setting: Setting) -> Iterator[str]:
        """Yield what follows where the sampler computes logprobs in its own way and nothing tells the two apart."""
        yield (
            f"old_logprobs: is missing, so clipping also acts on how far {setting.engine} is from "
            f"{' and '.join(setting.samplers)} in {setting.dtype}; add old_logprobs: {{node: logprobs, role: "
            f"{setting.role}}}, and perhaps a correction"
        )

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        is_stated = defined_by(self, "surrogate_formula") <= defined_by(self, "surrogate")
        stated = type(self) if is_stated else PolicyGradient
        surrogate = stated.surrogate_formula(self, symbols["advantages"])
        terms, where = surrogate.expression, dict[str, str]()
        if self.correction is not None:
            terms, where["c"] = f"c ({terms})", self.correction.expression(symbols["rollouts"])
        if self.kl_coef:
            terms += f" + {times(self.kl_coef, kl_expression(self.kl_estimator, 'd'))}"
            where |= {"d": "log(p / p_ref)", "p_ref": f"p by {symbols['reference']}"}
        if self.entropy_coef:
            terms, where["H"] = f"{terms} - {times(self.entropy_coef, 'H')}", "entropy of the model at the token"
        is_old_used = any("p_old" in text for text in (terms, *surrogate.where.values(), *where.values()))
        where = {**surrogate.where, **(old_probability(symbols) if is_old_used else {}), **where}
        rows = "finished responses" if self.skip_truncated else "responses"
        weighting = Weighting(aggregation=self.aggregation, constant_length=self.constant_length)
        return Formula(symbol="L", expression=f"{weighting.expression(rows)} of [{terms}]", where=where)

    def run(
        self,
        engine: Trains,
        rollouts: Rollouts,
        advantages: Advantages,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
    ) -> Metrics:
        return self.train_on(engine, rollouts, advantages, reference, old_logprobs)

    def train_on(
        self,
        engine: Trains,
        rollouts: Rollouts,
        advantages: Advantages,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
        columns: Mapping[str, Packed] = MappingProxyType({}),
    ) -> Metrics:
        """Train on the rollouts that have an advantage. ``columns`` are what the surrogate reads besides, a value for
        each response token."""
        columns = {"old_logprobs": rollouts.logprobs, "advantages": advantages.values, **columns}
        if old_logprobs is not None:
            columns |= {"old_logprobs": old_logprobs.values, "sampler_logprobs": rollouts.logprobs}
        if reference is not None:
            columns["reference"] = reference.values
        if not advantages.is_included.all():
            kept = np.flatnonzero(advantages.is_included)
            rollouts, columns = rollouts.take(kept), {name: column.take(kept) for name, column in columns.items()}
        steps = train(
            engine,
            rollouts,
            columns,
            self.loss(rollouts.temperature),
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
            weighting=Weighting(aggregation=self.aggregation, constant_length=self.constant_length),
            counting=rollouts.finished if self.skip_truncated else None,
            first_step=self.critic_warmup,
        )
        metrics = averaged(steps)
        first = next((step for step in steps if step), None)
        if old_logprobs is None and first is not None:
            # Before its first step the trained model is the one that wrote the rollouts, or the last of them.
            metrics["sampler_difference"] = first["logprob_change"]
        return Metrics(values=metrics)

    def measured_kl(self, output: Metrics, inputs: Mapping[str, Any]) -> float | None:
        """None where nothing was trained on."""
        return output.values.get("kl")


_CLIPPING = {
    "clip_ratio": "clip_eps",
    "clip_ratio_low": "clip_eps",
    "clip_ratio_high": "clip_eps_high",
    "epsilon": "clip_eps",
    "epsilon_high": "clip_eps_high",
}
_DUAL = {"clip_ratio_c": "dual_clip", "delta": "dual_clip"}


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(PolicyGradient, Node, kind="policy_update", unit="batch"):
    """PPO's clipped surrogate: -min(r A, clip(r) A), r the ratio of a token's probability to the old one.

    Source: PPO (arXiv 1707.06347), equation 7; with a ``clip_eps_high`` DAPO (arXiv 2503.14476), equation 10.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **_CLIPPING, **_DUAL}

    clip_eps: Annotated[float, Gt(0)] = 0.2
    """How far the ratio counts below 1, and above it."""
    clip_eps_high: Annotated[float, Gt(0)] | None = None
    """Above it, where that is not as far."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        return Formula(symbol="L", expression=term, where={"w": "p / p_old"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        of_tokens = ratio(logprobs - columns["old_logprobs"])
        return clipped(of_tokens, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class GspoUpdate(PolicyGradient, Node, kind="gspo_update", unit="batch"):
    """GSPO: the same with one ratio for a response, the geometric mean of its tokens' ratios.

    Source: arXiv 2507.18071, equations 5 to 7; the bounds are those of section 5.1.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **_CLIPPING, **_DUAL}

    aggregation: Aggregation = "sequence"
    clip_eps: Annotated[float, Gt(0)] = 3e-4
    clip_eps_high: Annotated[float, Gt(0)] | None = 4e-4
    """Where it is null: as below 1."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        return Formula(symbol="L", expression=term, where={"w": "exp(mean over the response of log(p / p_old))"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        of_responses = ratio(means_over_responses(logprobs - columns["old_logprobs"], columns["rows"]))
        return clipped(of_responses, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class CispoUpdate(PolicyGradient, Node, kind="cispo_update", unit="batch"):
    """CISPO: -clip(r) A log p, where no gradient flows through the ratio r: every token has one, none is dropped.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, whose experiments have no lower bound.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **_CLIPPING}

    clip_eps: Annotated[float, Gt(0), Lt(1)] | None = None
    """How far the ratio counts below 1. Null: without a bound."""

    clip_eps_high: Annotated[float, Gt(0)] = 4.0
    """How far the ratio counts above 1."""

    def surrogate_formula(self, advantage: str) -> Formula:
        low = 0 if self.clip_eps is None else 1 - self.clip_eps
        term = f"-clip(w, {low:g}, {1 + self.clip_eps_high:g}) {advantage} log p"
        return Formula(symbol="L", expression=term, where={"w": "p / p_old, without a gradient"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        free = ratio(logprobs.detach() - columns["old_logprobs"])
        bounded = free.clamp(0 if self.clip_eps is None else 1 - self.clip_eps, 1 + self.clip_eps_high)
        advantages = columns["advantages"]
        return -bounded * advantages * logprobs, clip_fractions(bounded != free, advantages)


@dataclass(frozen=True, kw_only=True)
class ReinforceUpdate(PolicyGradient, Node, kind="reinforce_update", unit="batch"):
    """REINFORCE: -A log p. For one optimizer step on what the policy itself has written: there is no ratio."""

    def cautions(self, setting: Setting) -> Iterator[str]:
        yield from super().cautions(setting)
        for option in ("num_minibatches", "num_epochs"):
            if (count := getattr(self, option)) > 1:
                yield (
                    f"{option}: is {count}, and this loss has no ratio: from the second optimizer step on it trains on "
                    "responses of an older policy as if they were its own; use 1, or policy_update"
                )

    def mismatch_cautions(self, setting: Setting) -> Iterator[str]:
        yield (
            f"correction: is missing, so responses of {' and '.join(setting.samplers)} count as if {setting.engine} "
            f"had sampled them, which is not exact in {setting.dtype}; add old_logprobs: {{node: logprobs, role: "
            f"{setting.role}}} and a correction"
        )

    def surrogate_formula(self, advantage: str) -> Formula:
        return Formula(symbol="L", expression=f"-{advantage} log p")

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        return -columns["advantages"] * logprobs, {}


@dataclass(frozen=True, kw_only=True)
class SftUpdate(Node, kind="sft_update", unit="batch"):
    """Supervised training on the responses of the data set."""

    num_minibatches: Annotated[int, Ge(1)] = 1

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="L", expression=f"{Weighting().expression('responses')} of [-log p]")

    def run(self, engine: Trains, examples: Examples) -> Metrics:
        steps = train(engine, examples, {}, LikelihoodLoss(), num_minibatches=self.num_minibatches)
        return Metrics(values=averaged(steps))


def clipped(
    free: "Tensor", advantages: "Tensor", eps: float, eps_high: float | None, dual_clip: float | None = None
) -> "Loss":
    """Return the loss [T] of the smaller of what a ratio [T] and a clipped one give, and the shares that are clipped.

    ``dual_clip`` bounds the ratio where the advantage is negative, which nothing else does (arXiv 1912.09729,
    equation 5).
    """
    bounded = free.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high))
    gain = (free * advantages).minimum(bounded * advantages)
    is_clipped = free * advantages > bounded * advantages
    if dual_clip is None:
        return -gain, clip_fractions(is_clipped, advantages)
    least = (dual_clip * advantages).where(advantages < 0, gain)
    return -gain.maximum(least), clip_fractions(is_clipped | (least > gain), advantages)


def clipped_expression(advantage: str, eps: float, eps_high: float | None, dual_clip: float | None) -> str:
    """Return the loss of ``clipped`` for people, w being the ratio."""
    high = eps if eps_high is None else eps_high
    term = f"-min(w {advantage}, clip(w, {1 - eps:g}, {1 + high:g}) {advantage})"
    return term if dual_clip is None else f"min({term}, {dual_clip:g} |{advantage}|)"


def clip_fractions(is_clipped: "Tensor", advantages: "Tensor") -> "Mapping[str, Tensor]":
    """Return the metrics of clipping, from where tokens are clipped [T]: the share of all tokens, of those with a
    positive advantage, and of those with a negative one."""
    share = is_clipped.to(advantages.dtype)
    return {
        "clip_fraction": share,
        "clip_fraction_positive": share.masked_fill(advantages <= 0, nan),
        "clip_fraction_negative": share.masked_fill(advantages >= 0, nan),
    }
