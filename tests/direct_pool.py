"""A pool without processes, for tests of what uses a pool: a fork server takes half a second to start."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlflow.rewards.base import CallableSpec, Failure
from rlflow.rewards.fork_server import _call_batch


class DirectPool:
    """A pool that calls functions of rewards and environments at once, in this process and without a time limit."""

    def __init__(self, specs: Mapping[str, CallableSpec], num_workers: int | None = None) -> None:
        self.callables = {name: spec.load(name) for name, spec in specs.items()}
        for loaded in self.callables.values():
            loaded.prepare()

    def submit(self, name: str, texts: Sequence[str], rows: Sequence[Any]) -> "list[Future[Any]]":
        size = self.callables[name].batch_size
        outcomes = []
        for start in range(0, len(texts), size):
            outcomes += self._outcomes(name, texts[start : start + size], rows[start : start + size])
        futures: list[Future[Any]] = [Future() for _ in outcomes]
        for future, outcome in zip(futures, outcomes, strict=True):
            future.set_result(outcome)
        return futures

    def stop(self) -> None:
        """Do nothing."""

    def _outcomes(self, name: str, texts: Sequence[str], rows: Sequence[Any]) -> list[Any]:
        answer = _call_batch(self.callables[name], texts, rows)
        if not isinstance(answer, Failure):
            return answer
        if len(texts) == 1 or answer.kind != "raised":
            return [answer] * len(texts)
        return [self._outcomes(name, [text], [row])[0] for text, row in zip(texts, rows, strict=True)]
