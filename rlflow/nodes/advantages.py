"""Advantages from rewards, or from a teacher. Rollouts without a reward count in no mean and get no advantage.

Shapes: B rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Repeated, Rewards, RolloutAdvantages, Rollouts, TokenAdvantages
from rlflow.errors import EngineError, GraphError, RecipeError
from rlflow.nodes.alarms import REWARDS_ARE_EQUAL
from rlflow.nodes.base import Formula, GraphNode, Node, NodeView
from rlflow.nodes.expressions import old_probability, times
from rlflow.nodes.kl import Estimator, check_kl, kl_expression, old_difference, token_kl
from rlflow.nodes.reward import Reward
from rlflow.recipe import Recipe
from rlflow.schema import Coefficient, Section

# Added to a batch's variance, as in verl and OpenRLHF: where all rewards agree, rounding errors stay small.
_EPSILON = 1e-8
WHITENED = f"(x - mean of x) / sqrt(variance of x + {_EPSILON:g}) over all tokens"
"""The formula of ``whiten`` for people."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Section):
    """The comparison of numbers with the others of their group."""

    normalize: bool = True
    """Divide by the group's standard deviation (of the sample, n - 1)."""
    epsilon: Annotated[float, Ge(1e-12), Le(100)] = 1e-4
    """Added to that standard deviation, which is 0 where all rewards of a group agree. TRL's value; verl has 1e-6."""

    def expression(self, symbol: str) -> str:
        """Return the comparison of what ``symbol`` names for people."""
        expression = f"{symbol} - mean of {symbol} in the group"
        return f"({expression}) / (std of {symbol} in the group + {self.epsilon:g})" if self.normalize else expression

    def compare(self, values: NDArray[np.floating[Any]], group: NDArray[np.int64]) -> NDArray[np.float64]:
        """Compare each of N values with those of its group. NaN values stay NaN and do not count."""
        centred, sizes = center_in_groups(values, group)
        if self.normalize:
            variance = np.bincount(group, np.nan_to_num(centred) ** 2) / np.maximum(sizes - 1, 1)
            centred = centred / (np.sqrt(variance) + self.epsilon)[group]
        return centred


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Comparison, Node, kind="group_advantage", unit="group"):
    """Reward minus its group's mean, over the group's standard deviation. Excluded rollouts do not count in either.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; without the division Dr. GRPO (arXiv 2503.20783).
    """

    alarms = (REWARDS_ARE_EQUAL,)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="A", expression=self.expression(symbols["rewards"]))

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        return repeat_for_tokens(self.compare(rewards.values, groups_of(rollouts)), rollouts)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutAdvantage(Node, kind="leave_one_out_advantage", unit="group"):
    """Reward minus the mean of the other rewards in its group; zero where there are no others.

    Source: RLOO (arXiv 2402.14740). It is n / (n - 1) times the reward minus the group's mean.
    """

    alarms = (REWARDS_ARE_EQUAL,)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward = symbols["rewards"]
        return Formula(symbol="A", expression=f"{reward} - mean of the other {reward} in the group")

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        group = groups_of(rollouts)
        centred, sizes = center_in_groups(rewards.values, group)
        return repeat_for_tokens(centred * (sizes / np.maximum(sizes - 1, 1))[group], rollouts)


@dataclass(frozen=True, kw_only=True)
class MaxRlAdvantage(Node, kind="maxrl_advantage", unit="group"):
    """Reward minus its group's mean, over that mean: a step towards maximum likelihood for rewards of 0 and 1.

    A group without any reward brings no gradient. Source: MaxRL (arXiv 2602.02710).
    """

    alarms = (REWARDS_ARE_EQUAL,)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward = symbols["rewards"]
        mean = f"mean of {reward} in the group"
        return Formula(symbol="A", expression=f"({reward} - {mean}) / {mean}, 0 where the mean is 0")

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        if (rewards.values < 0).any():
            fact = f"maxrl_advantage expected 0 or more, got {np.nanmin(rewards.values):g}"
            raise EngineError(f"rewards: {fact}.\n  Fix: rewards of 0 and 1, or node: group_advantage.")
        centred, _ = center_in_groups(rewards.values, groups_of(rollouts))
        mean = rewards.values - centred
        return repeat_for_tokens(np.divide(centred, mean, out=0 * centred, where=~(mean <= 0)), rollouts)


@dataclass(frozen=True, kw_only=True)
class GreedyAdvantage(Node, kind="greedy_advantage", unit="batch"):
    """Reward minus the reward of the likeliest response to the same prompt.

    Source: ReMax (arXiv 2310.10505). ``greedy`` are rollouts at temperature 0, in groups of one.
    """

    required_options: ClassVar[Mapping[str, Mapping[str, float]]] = {"greedy": {"temperature": 0, "group_size": 1}}
    other_responses: ClassVar[frozenset[str]] = frozenset({"greedy", "greedy_rewards"})

    def check_graph(self, view: NodeView) -> None:
        """Refuse a greedy response that is scored in another way than the others, or cut at another length."""
        read = view.node.inputs
        rewards, greedy_rewards = (_scoring(view.nodes, read[name]) for name in ("rewards", "greedy_rewards"))
        if _measure(rewards) != _measure(greedy_rewards):
            fact = f"scores the greedy response in another way than graph.{rewards.name} scores the others"
            raise GraphError(f"graph.{greedy_rewards.name}", fact, fix=f"the same options as in graph.{rewards.name}")
        for sampled, greedy in product(view.generators("rollouts"), view.generators("greedy")):
            assert sampled.operation.sampling is not None
            assert greedy.operation.sampling is not None
            actual, expected = greedy.operation.sampling.max_tokens, sampled.operation.sampling.max_tokens
            if actual != expected:
                path = f"graph.{greedy.name}.max_tokens"
                fact = f"{actual} differs from graph.{sampled.name}.max_tokens, which is {expected}"
                raise GraphError(path, fact, fix=f"{path}={expected}")

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="A", expression=f"{symbols['rewards']} - {symbols['greedy_rewards']}")

    def run(self, rollouts: Rollouts, rewards: Rewards, greedy: Rollouts, greedy_rewards: Rewards) -> RolloutAdvantages:
        both = np.concatenate([greedy.keys[:, :2], rollouts.keys[:, :2]])
        _, prompt = np.unique(both, axis=0, return_inverse=True)
        baseline = np.empty(len(greedy))
        baseline[prompt[: len(greedy)]] = greedy_rewards.values
        return repeat_for_tokens(rewards.values - baseline[prompt[len(greedy) :]], rollouts)


@dataclass(frozen=True, kw_only=True)
class BatchAdvantage(Node, kind="batch_advantage", unit="batch", compares_groups=True):
    """Reward minus its group's mean, normalized over all tokens of the batch.

    Source: REINFORCE++ with a baseline (arXiv 2501.03262).
    """

    unbiased: bool = False
    """Divide the variance by n - 1 tokens (as verl) in place of n (as OpenRLHF)."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward = symbols["rewards"]
        where = {"x": f"{reward} - mean of {reward} in the group"}
        return Formula(symbol="A", expression=WHITENED, where=where)

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        values, _ = center_in_groups(rewards.values, groups_of(rollouts))
        return repeat_for_tokens(whiten(values, rollouts.own_lengths, unbiased=self.unbiased), rollouts)


@dataclass(frozen=True, kw_only=True)
class TokenAdvantage(Node, kind="token_advantage", unit="batch", reads_tokens=True):
    """Reward minus the KL divergence from this token on times ``kl_coef``, normalized over all tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262).
    """

    kl_coef: Coefficient = 0.0
    """The factor of the divergence, which is subtracted from the reward. Needs a ``reference``."""
    kl_estimator: Estimator = "k1"
    """The estimator of a token's divergence; docs/algorithms.md compares them."""
    unbiased: bool = False
    """Divide the variance by n - 1 tokens (as verl) in place of n (as OpenRLHF)."""

    def check(self, connected: frozenset[str]) -> None:
        check_kl(self.kl_coef, None, connected)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward, where = symbols["rewards"], {"x": symbols["rewards"]}
        if self.kl_coef and "reference" in symbols:
            kl = times(self.kl_coef, f"sum of {kl_expression(self.kl_estimator, 'd_old')} from the token on")
            where = {"x": f"{reward} - {kl}", **old_difference(symbols)}
        return Formula(symbol="A", expression=WHITENED, where=where)

    def run(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
    ) -> TokenAdvantages:
        lengths, offsets = rollouts.response_ids.lengths, rollouts.response_ids.offsets
        values = np.repeat(rewards.values.astype(np.float64), lengths)
        if reference is not None:
            kl = token_kl(self.kl_estimator, rollouts, reference, old_logprobs)
            before = np.concatenate([[0.0], np.cumsum(kl.values)])
            # For each token, the sum over itself and the later tokens of its row.
            values -= self.kl_coef * (np.repeat(before[offsets[1:]], lengths) - before[:-1])
        excluded, is_own = np.isnan(rewards.values), rollouts.own_tokens().values
        advantages = whiten(values, is_own, unbiased=self.unbiased).astype(np.float32)
        return TokenAdvantages(values=Packed(advantages, offsets), excluded=excluded)


@dataclass(frozen=True, kw_only=True)
class TeacherAdvantage(Node, kind="teacher_advantage", unit="sample"):
    """The advantage log(teacher / policy) of each token: on-policy distillation.

    The policy's logprobs are ``old_logprobs``, or without them those of the engine that sampled. Later tokens do not
    change a token's advantage. So the expected policy gradient is the gradient of the reverse KL divergence between
    the policy's and the teacher's next token, after the policy's own response so far.

    Source: the single-step part of MiniLLM's gradient (arXiv 2306.08543, section 2.2), as in
    https://thinkingmachines.ai/blog/on-policy-distillation; GKD (arXiv 2306.13649, section 3) on the policy's own
    responses alone, with the reverse KL divergence, estimated at the sampled token.
    """

    def check_graph(self, view: NodeView) -> None:
        """Refuse a teacher that starts with the weights of the policy, because the two always agree."""
        teacher = view.origin("teacher")
        for update in view.nodes.values():
            trains = "Trains" in update.capabilities and view.node.name in update.inputs.values()
            if trains and teacher is not None and teacher.role is not None:
                _check_teacher(view.recipe, teacher.name, teacher.role, str(update.role))

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {**old_probability(symbols), "p_teacher": f"p by {symbols['teacher']}"}
        return Formula(symbol="A", expression="log(p_teacher / p_old)", where=where)

    def run(self, rollouts: Rollouts, teacher: Logprobs, old_logprobs: Logprobs | None = None) -> TokenAdvantages:
        kl = token_kl("k1", rollouts, teacher, old_logprobs)
        values = Packed((-kl.values).astype(np.float32), kl.offsets)
        return TokenAdvantages(values=values, excluded=rollouts.failed)


def _scoring(nodes: Mapping[str, GraphNode], name: str) -> GraphNode:
    """Return the node that scores responses for the node of this name, which may only subtract penalties."""
    node = nodes[name]
    return _scoring(nodes, node.inputs["rewards"]) if "rewards" in node.inputs else node


def _measure(node: GraphNode) -> object:
    """Return what two nodes have in common if they give the same rewards."""
    return node.role, node.operation.terms if isinstance(node.operation, Reward) else node.operation


def _check_teacher(recipe: Recipe, node: str, teacher: str, policy: str) -> None:
    """Check the models of the roles ``teacher``, which ``node`` asks, and ``policy``."""
    if teacher == policy:
        fact = f"the policy '{policy}' would be its own teacher, so that there is nothing to learn from it"
        raise GraphError(f"graph.{node}.role", fact, fix="a role of its own, with a better model")
    name, trained = recipe.roles[teacher].model, recipe.roles[policy].model
    model, start = recipe.models[name], recipe.models[trained]
    same = (model.path, model.recipe) == (start.path, start.recipe)
    if name == trained or (not model.random_weights and same):
        fact = f"has the weights with which '{policy}' starts, so that there is nothing to learn from it"
        raise RecipeError(f"roles.{teacher}.model", fact, fix="name a better model")


def groups_of(rollouts: Rollouts) -> NDArray[np.int64]:
    """Return the group number of each rollout [B]."""
    _, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
    return group


def center_in_groups(
    values: NDArray[np.floating[Any]], group: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each of N values minus the mean of its group [N], and how many values of each group are not NaN."""
    values = values.astype(np.float64)
    sizes = np.bincount(group, ~np.isnan(values)).astype(np.float64)
    return values - (np.bincount(group, np.nan_to_num(values)) / np.maximum(sizes, 1))[group], sizes


def whiten(
    values: NDArray[np.float64], weights: NDArray[np.int64] | NDArray[np.bool_], *, unbiased: bool
) -> NDArray[np.float64]:
    """Return ``values`` minus their mean, over their standard deviation. Each value stands for ``weights`` tokens.

    NaN values stay NaN and do not count.
    """
    counts = np.where(np.isnan(values), 0, weights)
    total = max(int(counts.sum()), 1)
    mean = (np.nan_to_num(values) * counts).sum() / total
    variance = (np.nan_to_num(values - mean) ** 2 * counts).sum() / max(total - unbiased, 1)
    whitened: NDArray[np.float64] = (values - mean) / np.sqrt(variance + _EPSILON)
    return whitened


def repeat_for_tokens(values: NDArray[np.float64], rollouts: Rollouts) -> RolloutAdvantages:
    """Repeat each rollout's advantage [B] for all of its tokens."""
    return RolloutAdvantages(values=Repeated(values.astype(np.float32), rollouts.response_ids.lengths))
