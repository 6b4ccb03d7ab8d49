"""Rewards from functions: one, or a weighted sum of several.

Shapes: B rollouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Packed, Rewards, Rollouts, count_reasons, known_mean
from rlflow.errors import EngineError, GraphError, RecipeError, below
from rlflow.nodes.base import Formula, Node, NodeView
from rlflow.nodes.expressions import times
from rlflow.nodes.scoring import REWARD_HEADLINE
from rlflow.rewards.base import MAX_FLOAT32, Failure, Outcome, Row, Scored
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import ProcessPool
from rlflow.rewards.styles import STYLES, JudgedResponse

# The rewards of a sum whose weights are all smaller are rounding errors beside an advantage's own epsilon.
_LEAST_WEIGHT = 1e-9
_FIX_ROW = (
    "correct the row or remove it from the data, name the column in data.columns, or on_failure: exclude, which leaves "
    "out responses to such rows"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class SummedRewards(Rewards):
    """Weighted sums of the results of several functions, the parts."""

    parts: Mapping[str, NDArray[np.float32]]
    """[B] each, before its weight; NaN where the function failed or has nothing to say."""
    details: Mapping[str, NDArray[np.float32]]
    """[B] each, the further numbers that functions returned, as FUNCTION/NAME; NaN where there is none."""
    reasons: NDArray[np.str_]
    """[B], why a function failed, whatever reward the response has; empty where none failed."""

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return all rows of the parts in order; a part may lack numbers that another one has."""
        names = {name for part in parts for name in part.details}
        missing = [np.full(len(part), np.nan, np.float32) for part in parts]
        return super().concatenate(
            [
                replace(part, details={name: part.details.get(name, none) for name in names})
                for part, none in zip(parts, missing, strict=True)
            ]
        )

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of all rewards, the share of responses with a failure, and the mean of each part.

        A single part is the sum itself, and a part that failed everywhere has no mean. Further numbers are averaged
        over the responses that have them.
        """
        means = {f"{part}/mean": values for part, values in self.parts.items()} if len(self.parts) > 1 else {}
        averaged = {
            name: known_mean(values) for name, values in {**self.details, **means}.items() if np.isfinite(values).any()
        }
        return {**averaged, **super().metrics(), "failed": float(np.mean(self.reasons != ""))}

    def failures(self) -> Mapping[str, int]:
        """Return why functions failed."""
        return count_reasons(self.reasons)


@dataclass(frozen=True, kw_only=True)
class Reward(Node, kind="reward", unit="sample"):
    """A number for each rollout: the result of a function, or the weighted sum of several."""

    headline = REWARD_HEADLINE

    function: str | None = None
    """A name from rlflow.rewards.functions, or ``package.module:function``: short for ``functions`` with one entry."""
    functions: Mapping[str, RewardTerm] = field(default_factory=dict)

    def check(self, connected: frozenset[str]) -> None:
        if (self.function is None) == (not self.functions):
            got, fix = ("neither", "function: exact") if self.function is None else ("both", "function: null")
            raise RecipeError("function", f"expected one of 'function' and 'functions', got {got}", fix=fix)
        if self.functions and all(abs(part.weight) < _LEAST_WEIGHT for part in self.functions.values()):
            fact = "the weights of all functions are 0, and so is every reward"
            raise RecipeError("functions", fact, fix="weight: 1 for the function that counts")
        for name, part in self.functions.items():
            with below(f"functions.{name}"):
                part.load(name)
                if isinstance(part.on_failure, float) and not self._fits(part, part.on_failure):
                    fact = f"{part.on_failure:g} is too large for a sum in float32 with a weight of {part.weight:g}"
                    raise RecipeError("on_failure", fact, fix="use a smaller number")
        if self.function is not None:
            self._check_function(self.function)

    def _check_function(self, function: str) -> None:
        """Check the short form, which has no options."""
        try:
            RewardTerm().load(function)
        except RecipeError as error:
            if not error.path.startswith("options"):
                raise
            fix = f"functions: {{{function}: {{options: {{...}}}}}} in its place"
            raise RecipeError("function", f"'{function}' needs options: {error.path} {error.fact}", fix=fix) from None

    def check_graph(self, view: NodeView) -> None:
        for name, term in self.terms.items():
            for generator in view.generators() if (term.function or name) == "environment" else ():
                if not getattr(generator.operation, "gives_rewards", False):
                    path = f"{view.path}.function" if self.function else f"{view.path}.functions.{name}"
                    fact = f"no environment gives rewards to the responses of graph.{generator.name}"
                    fix = "another function, or a node 'converse' whose environment gives rewards"
                    raise GraphError(path, fact, fix=fix)

    def check_host(self) -> None:
        ProcessPool(self.terms).stop()

    def check_rows(self, rows: Sequence[Row], where: str) -> Iterator[str]:
        for name, term in self.terms.items():
            check_row = term.load(name).check_row
            reasons = {number: failure.reason for number, row in enumerate(rows) if (failure := check_row(row))}
            if not reasons:
                continue
            number, reason = next(iter(reasons.items()))
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            fact = f"'{term.function or name}' {reason}: row {number} of {where}{more}"
            if term.on_failure == "stop":
                raise RecipeError(self._path_of(name), fact, fix=_FIX_ROW)
            yield f"{self._path_of(name)}: {fact}"

    def _path_of(self, name: str) -> str:
        return "function" if self.function is not None else f"functions.{name}"

    @property
    def reads_rendered_prompts(self) -> bool:
        """Return whether rows need the text of their prompt as the model reads it."""
        return any(term.style != "rlflow" and STYLES[term.style].reads_rendered_prompts for term in self.terms.values())

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        parts = (times(part.weight, name) for name, part in self.terms.items() if part.weight)
        return Formula(symbol="r", expression=" + ".join(parts) or "0")

    def run(self, rollouts: Rollouts) -> Rewards:
        parts = {name: np.full(len(rollouts), np.nan, np.float32) for name in self.terms}
        is_silent = {name: np.zeros(len(rollouts), np.bool_) for name in self.terms}
        details: dict[str, NDArray[np.float32]] = {}
        reasons = rollouts.reasons.tolist() if isinstance(rollouts, Conversations) else [""] * len(rollouts)
        places = self._submit(rollouts)
        try:
            for future in as_completed(places):
                (name, row), outcome = places[future], future.result()
                if isinstance(outcome, Scored):
                    for key, number in outcome.metrics.items():
                        detail = f"{name.rpartition(':')[2]}/{key}"
                        details.setdefault(detail, np.full(len(rollouts), np.nan, np.float32))[row] = number
                    outcome = outcome.reward
                if outcome is None:
                    is_silent[name][row] = True
                    continue
                outcome = self._within_float32(name, outcome)
                if isinstance(outcome, Failure):
                    reasons[row] = f"'{name}' {outcome.reason}"
                    outcome = self._value_of_failure(name, outcome)
                parts[name][row] = outcome
        finally:
            for future in places:
                future.cancel()
        values = self._sum(parts, is_silent)
        turns = self._by_turn(rollouts, values) if isinstance(rollouts, Conversations) else None
        return SummedRewards(values=values, turns=turns, parts=parts, details=details, reasons=np.array(reasons))

    def _submit(self, rollouts: Rollouts) -> "Mapping[Future[Outcome], tuple[str, int]]":
        """Call all functions about the rollouts that have not failed; return the term and the row of each future."""
        rows = np.flatnonzero(~rollouts.failed).tolist()
        all_texts, all_rows = tuple(rollouts.texts), tuple(rollouts.rows)
        texts, data_rows = [all_texts[row] for row in rows], [all_rows[row] for row in rows]
        responses = [
            JudgedResponse(
                all_rows[row], rollouts.response_ids[row].tolist(), "stop" if rollouts.finished[row] else "length"
            )
            for row in (rows if any(loaded.reads_tokens for loaded in self._pool.callables.values()) else ())
        ]
        return {
            future: (name, row)
            for name, loaded in self._pool.callables.items()
            for row, future in zip(
                rows, self._pool.submit(name, texts, responses if loaded.reads_tokens else data_rows), strict=True
            )
        }

    def _sum(
        self, parts: Mapping[str, NDArray[np.float32]], is_silent: Mapping[str, NDArray[np.bool_]]
    ) -> NDArray[np.float32]:
        """Return the weighted sums of what functions said; NaN where one failed, or none that counts said anything."""
        counted = {name: part.weight for name, part in self.terms.items() if part.weight}
        values = np.zeros(len(next(iter(parts.values()))), np.float64)
        for name, weight in counted.items():
            values += np.where(is_silent[name], 0, weight * parts[name].astype(np.float64))
        values[np.all([is_silent[name] for name in counted], axis=0)] = np.nan
        return values.astype(np.float32)

    def _by_turn(self, conversations: Conversations, values: NDArray[np.float32]) -> Packed | None:
        """Return the rewards of single turns: the environment's where it gave them, and all others in the last turn.

        None where the environment's rewards do not count.
        """
        weight = sum(part.weight for name, part in self.terms.items() if (part.function or name) == "environment")
        if not weight:
            return None
        given = conversations.turn_rewards
        by_turn, ends = weight * given.values.astype(np.float64), given.offsets[1:]
        known = (given.lengths > 0) & ~np.isnan(values)
        before = np.concatenate([[0.0], np.cumsum(by_turn)])
        by_turn[ends[known] - 1] += (values - np.diff(before[given.offsets]))[known]
        return given.like(by_turn.astype(np.float32))

    def __getstate__(self) -> Mapping[str, Any]:
        """Leave out the worker processes, which every process starts for itself."""
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    @cached_property
    def terms(self) -> Mapping[str, RewardTerm]:
        """Return the terms of the sum by name, also for the short form."""
        return self.functions or {str(self.function): RewardTerm()}

    @cached_property
    def _pool(self) -> ProcessPool:
        """Start worker processes, which live as long as this node is used."""
        return ProcessPool(self.terms)

    def _within_float32(self, name: str, outcome: float | Failure) -> float | Failure:
        term = self.terms[name]
        if isinstance(outcome, Failure) or self._fits(term, outcome):
            return outcome
        fact = f"returned {outcome:g}, too large for a sum in float32 with a weight of {term.weight:g}"
        return Failure("invalid", fact)

    def _fits(self, part: RewardTerm, value: float) -> bool:
        """Return whether the sum of all parts is finite in float32 if no weighted value is larger than this one."""
        return abs(value) <= MAX_FLOAT32 and abs(part.weight * value) <= MAX_FLOAT32 / len(self.terms)

    def _value_of_failure(self, name: str, failure: Failure) -> float:
        """Return the value of a part that failed, NaN to exclude it. Raise an error with ``on_failure: stop``."""
        part = self.terms[name]
        if part.on_failure == "exclude":
            return np.nan
        if part.on_failure != "stop":
            return part.on_failure
        fact = f"'{part.function or name}' {failure.reason}"
        path = self._path_of(name)
        if failure.kind == "unreadable":
            raise RecipeError(path, fact, fix=_FIX_ROW)
        if failure.kind in ("raised", "invalid"):
            contract = "it returns a number for each response, None to leave it out, or a dictionary with its score"
            raise RecipeError(path, fact, fix=contract)
        raise EngineError(f"reward {fact}. With on_failure: exclude under functions, such responses are left out.")
