"""What all ways to train a policy on its rollouts have in common."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from rlflow.batch import Advantages, Logprobs, Metrics, Packed, Rollouts
from rlflow.engines.base import Trains
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import Setting
from rlflow.nodes.correction import Correction
from rlflow.nodes.formula import Formula, defined_by, kl_expression, old_probability, times
from rlflow.nodes.kl import Estimator, check_kl
from rlflow.nodes.losses import PolicyLoss
from rlflow.nodes.training import Aggregation, Weighting, averaged, train
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor


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
    called_elsewhere: ClassVar[Mapping[str, str]] = {
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
        if not advantages.known.all():
            kept = np.flatnonzero(advantages.known)
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
