"""Updates of a policy on its rollouts: the options that all of them share, and PPO's clipped surrogate.

Shapes: T response tokens of a micro-batch.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le, Unit

from rlflow.batch import Advantages, Logprobs, Metrics, Packed, Rollouts
from rlflow.engines.base import Trains
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.alarms import POLICY_ALARMS, Alarm
from rlflow.nodes.base import Formula, GraphNode, Headline, Node, NodeView
from rlflow.nodes.expressions import inheritance_depth, old_probability, times
from rlflow.nodes.kl import Estimator, KlCoefficient, check_kl, kl_expression, ratio
from rlflow.nodes.minibatches import Aggregation, OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.old_logprobs import score_later_minibatches
from rlflow.nodes.policy_loss import (
    CLIPPING,
    DUAL_CLIPPING,
    Correction,
    PolicyLoss,
    check_clipping,
    clipped_expression,
    clipped_surrogate,
)
from rlflow.schema import ClipDistance, ClipShare, Coefficient, Count, CountOrZero, Divergence, Section

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.nodes.policy_loss import Columns, Loss

# The age of tokens from which clipping around the policy that sampled them costs learning: benchmarks/staleness.py.
_STALE = 2
_OLD = "graph.old_logprobs={node: logprobs, role: actor}"


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Section):
    """The base of policy updates. A kind of node derives from this and from Node, and adds a ``surrogate``.

    Excluded rollouts are in no minibatch. Ratios are taken to ``old_logprobs`` where such a node is connected, else to
    the logprobs of the engine that sampled.

    The metric ``sampler_difference`` is the mean absolute difference between the logprobs of the two engines. Without
    ``old_logprobs`` it is measured on the first minibatch, before that changes the model; with ``old_logprobs`` it is
    the mean over all optimizer steps.
    """

    kind: ClassVar[str]
    hints_for_other_names: ClassVar[Mapping[str, str]] = {
        "beta": "kl_coef",
        "kl_loss_coef": "kl_coef",
        "kl_loss_type": "kl_estimator: k1, k2 or k3",
        "entropy_coeff": "entropy_coef",
        "loss_agg_mode": "aggregation: token, prompt, sequence or constant",
        "loss_type": "aggregation: token, prompt, sequence or constant",
        "ppo_epochs": "num_epochs",
        "num_iterations": "num_epochs",
        "ppo_mini_batch_size": "num_minibatches, the number of them",
        "use_bias_correction_kl": "unbiased_kl",
        "off_policy_mask_threshold": "off_policy_mask",
        "mask_truncated_completions": "skip_truncated",
        "tis": f"{_OLD} and correction: {{level: token, outside: bound, max_ratio: 2}}",
        "tis_imp_ratio_cap": f"{_OLD} and correction: {{level: token, outside: bound, max_ratio: 2}}",
        "icepop": f"{_OLD} and correction: {{level: token, outside: mask, min_ratio: 0.5, max_ratio: 5}}",
    }

    headline: ClassVar[Headline | None] = Headline("kl", ".4f", label="kl")
    alarms: ClassVar[tuple[Alarm, ...]] = POLICY_ALARMS

    aggregation: Aggregation = "token"
    """The unit of equal weight: each ``token``, ``prompt`` or ``sequence``. ``constant`` divides by a fixed length."""
    constant_length: Count | None = None
    """The number of tokens by which ``aggregation: constant`` divides each response."""
    kl_coef: Coefficient = 0.0
    """The coefficient of the KL divergence in the loss. Needs a ``reference``."""
    kl_estimator: Estimator = "k3"
    """The estimator of a token's divergence; docs/algorithms.md compares them."""
    unbiased_kl: bool = False
    """Multiply the estimate by the ratio to the old policy, which makes the gradient unbiased (arXiv 2512.02556)."""
    kl_target: Annotated[Divergence, Unit("nats per token")] | None = None
    """A divergence of tokens. ``kl_coef`` is then the start value, and follows the target from step to step."""
    entropy_coef: Coefficient = 0.0
    """The coefficient of the entropy, which the loss increases."""
    correction: Correction | None = None
    """An importance weight for what sampled: an engine of other numerics, older versions. Needs ``old_logprobs``."""
    off_policy_mask: Annotated[Divergence, Unit("nats per token")] | None = None
    """Leave out responses with a negative advantage whose mean log(p_sampler / p) is larger (arXiv 2512.02556)."""
    skip_truncated: bool = False
    """Do not train on responses that were cut at the limit (DAPO's overlong filtering)."""
    critic_warmup: Annotated[CountOrZero, Unit("steps")] = 0
    """The number of first steps that train the critic alone: the policy's learning rate is 0, and its schedule begins
    after them."""
    num_minibatches: Count = 1
    """The number of optimizer steps that the rollouts are divided among."""
    num_epochs: Annotated[int, Ge(1), Le(100)] = 1
    """How often a step trains on its rollouts; prompts are shuffled after the first time."""
    score_first_minibatch: bool = False
    """Let ``old_logprobs`` score the first minibatch too, although the update's own forward pass gives the same."""

    @abstractmethod
    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        """Return the loss [T] and metrics [T] from the model's logprobs [T] and the columns of PolicyLoss."""

    def surrogate_formula(self, advantage: str) -> Formula:
        """Return the surrogate of one token for people, w being the ratio; ``advantage`` is the advantage's symbol."""
        return Formula(symbol="L", expression=f"{self.kind}(w, {advantage})", where={"w": "p / p_old"})

    def run(
        self,
        engine: Trains,
        rollouts: Rollouts,
        advantages: Advantages,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
        state: KlCoefficient | None = None,
        *,
        columns: Mapping[str, Packed] = MappingProxyType({}),
    ) -> Metrics:
        """Train on the rollouts that have an advantage.

        ``columns`` are further inputs of the surrogate, with a value for each response token.
        """
        columns = {"old_logprobs": rollouts.logprobs, "advantages": advantages.values, **columns}
        if old_logprobs is not None:
            columns |= {"old_logprobs": old_logprobs.values, "sampler_logprobs": rollouts.logprobs}
        if reference is not None:
            columns["reference"] = reference.values
        if not advantages.is_included.all():
            known = np.flatnonzero(advantages.is_included)
            rollouts, columns = rollouts.take(known), {name: column.take(known) for name, column in columns.items()}
        node = self if state is None else replace(self, kl_coef=state.kl_coef)
        steps = train(
            engine,
            rollouts,
            columns,
            node.loss(rollouts.temperature),
            OptimizerSteps(
                num_minibatches=self.num_minibatches,
                num_epochs=self.num_epochs,
                weighting=self._weighting,
                first_step=self.critic_warmup,
            ),
            counting=rollouts.finished if self.skip_truncated else None,
        )
        metrics = mean_metrics(steps)
        first = next((step for step in steps if step), None)
        if old_logprobs is None and first is not None:
            # Before its first optimizer step the trained model is the one that generated the (last) rollouts.
            metrics["sampler_difference"] = first["logprob_change"]
        if state is not None and self.kl_target is not None and "kl" in metrics:
            state.follow(metrics["kl"], self.kl_target)
        return Metrics(values=metrics)

    def loss(self, temperature: float) -> PolicyLoss:
        """Return the loss of a token."""
        return PolicyLoss(
            surrogate=self.surrogate,
            temperature=temperature,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            unbiased_kl=self.unbiased_kl,
            entropy_coef=self.entropy_coef,
            correction=self.correction,
            off_policy_mask=self.off_policy_mask,
        )

    def new_state(self) -> KlCoefficient | None:
        return None if self.kl_target is None else KlCoefficient(self.kl_coef)

    @property
    def warmup_steps(self) -> int:
        """Return the steps that train the critic alone."""
        return self.critic_warmup

    @property
    def _weighting(self) -> Weighting:
        return Weighting(aggregation=self.aggregation, constant_length=self.constant_length)

    def check(self, connected: frozenset[str]) -> None:
        check_kl(self.kl_coef, self.kl_target, connected)
        if self.correction is not None:
            self.correction.check(connected)
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise GraphError(
                "constant_length",
                f"is {self.constant_length}, and aggregation is '{self.aggregation}'",
                fix="both aggregation: constant and a constant_length, or neither",
            )

    def replacements(self, view: NodeView) -> Mapping[str, GraphNode]:
        # A run of a subclass may read the logprobs itself.
        needs_all = self.score_first_minibatch or self.num_epochs > 1 or type(self).run is not PolicyGradient.run
        return {} if needs_all else score_later_minibatches(view, self.num_minibatches)

    def check_graph(self, view: NodeView) -> None:
        path, role = f"{view.path}.critic_warmup", view.node.role
        for generator in view.generators():
            _check_sampling(view, generator)
        if self.critic_warmup and view.trained_roles == [role]:
            fact = f"{self.critic_warmup} steps would train nothing: no node trains a critic"
            raise GraphError(path, fact, fix=f"{path}=0, or roles.{role}.optimizer.warmup_steps")

    def cautions(self, view: NodeView) -> Iterator[str]:
        if self.critic_warmup >= view.recipe.steps:
            yield f"critic_warmup: all {view.recipe.steps} steps train the critic alone, and none trains the policy"
        if self.kl_coef and self.kl_estimator == "k1" and not self.unbiased_kl:
            yield "kl_estimator: in a loss the gradient of k1 is zero on average, so it does nothing; use k2 or k3"
        staleness = view.recipe.overlap.max_staleness
        if staleness >= _STALE and self.correction is None:
            yield (
                f"correction: is missing, and tokens are up to {staleness} versions old, which slows "
                f"learning; add old_logprobs: {{node: logprobs, role: {view.node.role}}} and correction: "
                "{level: token, outside: bound, max_ratio: 2}"
            )
        # In float32 engines agree to about 1e-6, far from every bound of a ratio.
        if view.samplers and view.dtype != "float32" and "old_logprobs" not in view.node.inputs:
            yield from self.mismatch_cautions(view)

    def mismatch_cautions(self, view: NodeView) -> Iterator[str]:
        """Yield the cautions for a sampler whose logprobs differ numerically, without ``old_logprobs``."""
        yield (
            f"old_logprobs: is missing, so clipping also acts on the numerical difference between {view.engine} and "
            f"{' and '.join(view.samplers)} in {view.dtype}; add old_logprobs: {{node: logprobs, role: "
            f"{view.node.role}}}, and perhaps a correction"
        )

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        is_stated = inheritance_depth(self, "surrogate_formula") <= inheritance_depth(self, "surrogate")
        stated = type(self) if is_stated else PolicyGradient
        surrogate = stated.surrogate_formula(self, symbols["advantages"])
        terms, where = surrogate.expression, dict[str, str]()
        if self.correction is not None:
            terms, where["c"] = f"c ({terms})", self.correction.expression(symbols["rollouts"])
        if self.kl_coef:
            kl = kl_expression(self.kl_estimator, "d")
            terms += f" + {times(self.kl_coef, f'(p / p_old) {kl}' if self.unbiased_kl else kl)}"
            where |= {"d": "log(p / p_ref)", "p_ref": f"p by {symbols['reference']}"}
        if self.entropy_coef:
            terms, where["H"] = f"{terms} - {times(self.entropy_coef, 'H')}", "entropy of the model at the token"
        is_old_used = any("p_old" in text for text in (terms, *surrogate.where.values(), *where.values()))
        where = {**surrogate.where, **(old_probability(symbols) if is_old_used else {}), **where}
        rows = "finished responses" if self.skip_truncated else "responses"
        return Formula(symbol="L", expression=f"{self._weighting.expression(rows)} of [{terms}]", where=where)


def _check_sampling(view: NodeView, generator: GraphNode) -> None:
    """Check that a policy trains on its own responses, and that they differ."""
    role, trained, sampling = str(generator.role), str(view.node.role), generator.operation.sampling
    if role != trained and view.recipe.roles[role].follows != trained:
        fact = f"{view.path} trains '{trained}' on responses of '{role}', which never gets its weights"
        raise RecipeError(f"roles.{role}.follows", fact, fix=f"roles.{role}.follows={trained}")
    if sampling is not None and sampling.temperature == 0:
        fact = f"with 0 all responses to a prompt are the same, and {view.path} learns from their differences"
        settings = {name: node.operation.sampling for name, node in view.nodes.items()}
        sampled = [name for name, setting in settings.items() if setting is not None and setting.temperature > 0]
        fix = f"{view.path}.rollouts={sampled[0]}" if sampled else f"graph.{generator.name}.temperature=1"
        raise GraphError(f"graph.{generator.name}.temperature", fact, fix=fix)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(PolicyGradient, Node, kind="policy_update", unit="batch"):
    """PPO's clipped surrogate: -min(r A, clip(r) A), r the ratio of a token's probability to the old one.

    Source: PPO (arXiv 1707.06347), equation 7; with a ``clip_eps_high`` DAPO (arXiv 2503.14476), equation 10.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {
        **PolicyGradient.hints_for_other_names,
        **CLIPPING,
        **DUAL_CLIPPING,
    }

    clip_eps: ClipShare = 0.2
    """The distance from 1 at which the ratio is clipped."""
    clip_eps_high: ClipDistance | None = None
    """The distance above 1, where it differs."""
    dual_clip: Annotated[float, Gt(1), Le(1e9)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""

    def check(self, connected: frozenset[str]) -> None:
        super().check(connected)
        check_clipping(self.clip_eps, self.clip_eps_high)

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        return Formula(symbol="L", expression=term, where={"w": "p / p_old"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        ratios = ratio(logprobs - columns["old_logprobs"])
        return clipped_surrogate(ratios, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)
