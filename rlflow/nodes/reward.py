"""Judging responses."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlflow.batch import Conversations, Rewards, Rollouts, SummedRewards
from rlflow.errors import EngineError, RecipeError, below
from rlflow.nodes.base import Formula, Node, times
from rlflow.rewards.base import MAX_FLOAT32, Failure, Outcome
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.fork_client import Call
from rlflow.rewards.pool import ProcessPool


@dataclass(frozen=True, kw_only=True)
class Reward(Node, kind="reward", unit="sample"):
    """A number for each rollout: a function's, or the weighted sum of several."""

    function: str | None = None
    """Of rlflow.rewards.functions, or ``package.module:function``; short for ``functions`` with it alone."""
    functions: Mapping[str, RewardTerm] = field(default_factory=dict)

    def check(self, connected: frozenset[str]) -> None:
        if (self.function is None) == (not self.functions):
            has = "neither is" if self.function is None else "both are"
            raise RecipeError(
                "function", f"one of 'function' and 'functions' is needed, and {has} there", fix="function: exact"
            )
        for name, part in self.functions.items():
            with below(f"functions.{name}"):
                part.load(name)
                if isinstance(part.on_failure, float) and not self._fits(part, part.on_failure):
                    fact = f"{part.on_failure:g} is too large for a sum in float32 with a weight of {part.weight:g}"
                    raise RecipeError("on_failure", fact, fix="a smaller number")
        if self.function is not None:
            self._check_short(self.function)

    def _check_short(self, function: str) -> None:
        try:
            RewardTerm().load(function)
        except RecipeError as error:
            if not error.path.startswith("options"):
                raise
            fix = f"functions: {{{function}: {{options: {{...}}}}}} in its place"
            raise RecipeError("function", f"'{function}' needs options: {error.path} {error.fact}", fix=fix) from None

    def try_out(self) -> None:
        """Raises EngineError when the functions cannot run on this host."""
        ProcessPool(self._parts).stop()

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        parts = (times(part.weight, name) for name, part in self._parts.items() if part.weight)
        return Formula(symbol="r", expression=" + ".join(parts) or "0")

    def run(self, rollouts: Rollouts) -> Rewards:
        given = {name: np.full(len(rollouts), np.nan, np.float32) for name in self._parts}
        reasons = rollouts.reasons.tolist() if isinstance(rollouts, Conversations) else [""] * len(rollouts)
        judged = np.flatnonzero(~rollouts.failed).tolist()
        with closing(self._pool.outcomes(self._calls(rollouts, judged))) as outcomes:
            for call, results in outcomes:
                for place, result in zip(call.indices, results, strict=True):
                    if failure := self._failure(call.name, result):
                        reasons[place] = f"'{call.name}' {failure.reason}"
                        result = self._instead(call.name, failure)
                    given[call.name][place] = result
        values = np.zeros(len(rollouts), np.float64)
        for name, part in self._parts.items():
            values += part.weight * given[name].astype(np.float64) if part.weight else 0
        return SummedRewards(values=values.astype(np.float32), parts=given, reasons=np.array(reasons))

    def __getstate__(self) -> Mapping[str, Any]:
        """Processes do not travel."""
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    @cached_property
    def _parts(self) -> Mapping[str, RewardTerm]:
        return self.functions or {str(self.function): RewardTerm()}

    @cached_property
    def _pool(self) -> ProcessPool:
        """Of processes that live as long as this node is used."""
        return ProcessPool(self._parts)

    def _calls(self, rollouts: Rollouts, judged: Sequence[int]) -> Iterator[Call]:
        texts, rows = tuple(rollouts.texts), tuple(rollouts.rows)
        for name, found in self._pool.callables.items():
            for start in range(0, len(judged), found.batch_size):
                places = judged[start : start + found.batch_size]
                yield Call(name, places, [texts[place] for place in places], [rows[place] for place in places])

    def _failure(self, name: str, result: Outcome) -> Failure | None:
        part = self._parts[name]
        if isinstance(result, Failure):
            return result
        if self._fits(part, result):
            return None
        return Failure(
            "invalid", f"returned {result:g}, too large for a sum in float32 with a weight of {part.weight:g}"
        )

    def _fits(self, part: RewardTerm, value: float) -> bool:
        """Return whether the sum of all parts is finite in float32 if no weighted value is larger than this one."""
        return abs(value) <= MAX_FLOAT32 and abs(part.weight * value) <= MAX_FLOAT32 / len(self._parts)

    def _instead(self, name: str, failure: Failure) -> float:
        """What a response gets that has no reward. Raises RecipeError or EngineError where that ends the run."""
        part = self._parts[name]
        if part.on_failure == "exclude":
            return np.nan
        if part.on_failure != "stop":
            return part.on_failure
        fact = f"'{part.function or name}' {failure.reason}"
        path = "function" if self.function is not None else f"functions.{name}"
        if failure.kind == "unreadable":
            without = "on_failure: exclude, which leaves out responses to such rows"
            raise RecipeError(path, fact, fix=f"mend the row or remove it from the data, or {without}")
        if failure.kind in ("raised", "invalid"):
            takes = "it is called with texts of responses and rows of the data set, and returns a number for each"
            raise RecipeError(path, fact, fix=takes)
        raise EngineError(f"reward {fact}. With on_failure: exclude such responses are left out.")
