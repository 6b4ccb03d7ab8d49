"""Prompts begun before their step: here over engines that are threads, and whose responses are known beforehand."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.data.source import DataSource
from rlflow.engines.base import EngineSpec, Sampling, sample_seed
from rlflow.engines.groups import NOTHING, Begun, continued
from rlflow.engines.serving.sessions import Progress
from rlflow.errors import EngineError
from rlflow.nodes.generate import Generate
from rlflow.runtime.rollout.overcommit import Overcommitted
from rlflow.runtime.rollout.writing import Writing
from tests.helpers import WritingEngine, prompts, spec
from tests.unit.runtime.test_proxies import Threads

BATCH, AHEAD, STEPS = 6, 3, 6
GENERATE = Generate(max_tokens=40, group_size=3, overcommit=0.5)
SAMPLING = GENERATE.sampling


def response(key: NDArray[np.int64]) -> list[int]:
    """Up to as many tokens as are allowed, of which a 0 is the last."""
    draw = np.random.default_rng(sample_seed(0, key))
    length = 1 + int(draw.exponential(8))
    ids = draw.integers(1, 10, length).tolist()
    return ([*ids[:-1], 0] if length <= SAMPLING.max_tokens else ids)[: SAMPLING.max_tokens]


class Stepwise(WritingEngine):
    """Writes a token of each sample that it has until one is done, whenever it is given some or is asked."""

    def __init__(self, given: EngineSpec, room: tuple[int, int] = (16, 10_000)) -> None:
        super().__init__(given, room)
        self.begun: list[tuple[list[int], int]] = []
        self._live: list[tuple[Future[Any], Any]] = []
        self._lock = threading.Lock()

    def submit(self, samples: Prompts, sampling: Sampling, begun: Sequence[Begun] | None = None) -> "list[Future[Any]]":
        answers: list[Future[Any]] = []
        for key, before in zip(samples.keys, begun or [NOTHING] * len(samples), strict=True):
            left = response(key)
            assert left[: len(before.ids)] == before.ids.tolist()
            del left[: len(before.ids)]
            self.begun.append((key.tolist(), len(before.ids)))
            answers.append(Future())
            written = SimpleNamespace(left=left, ids=[], begun=before, version=self._version, length=len(before.ids))
            self._live.append((answers[-1], written))
        self._go_on()
        return answers

    def write(self, rows: bytes, enough: int) -> Progress:
        if not rows:
            self._go_on()
        return super().write(rows, enough)

    def _go_on(self) -> None:
        assert self._session is not None
        with self._lock:
            if not self._session._done.empty():
                return
            done: list[Future[Any]] = []
            while self._live and not done:
                self._steps += 1
                for answer, written in self._live:
                    written.ids.append(written.left.pop(0))
                    written.length += 1
                    if not written.left:
                        done.append(answer)
            finished = [each for each in self._live if each[0] in done]
            self._live = [each for each in self._live if each[0] not in done]
        for answer, written in finished:
            answer.set_result(written)

    def break_off(self) -> None:
        with self._lock:
            broken, self._live = self._live, []
        for answer, written in broken:
            answer.set_result(written)

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        ids = Packed.from_rows([each.ids for each in responses], np.int32)
        versions = Packed.from_rows([np.full(len(each.ids), each.version) for each in responses], np.int32)
        before = [each.begun for each in responses]
        columns = continued(before, ids, ids.like(-versions.values.astype(np.float32)), versions)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=columns[0],
            logprobs=columns[1],
            versions=columns[2],
            temperature=1.0,
            finished=np.array([columns[0][row][-1] == 0 for row in range(len(samples))]),
            texts=tuple(str(columns[0][row].tolist()) for row in range(len(samples))),
            rows=samples.rows,
        )


def of_step(step: int) -> Prompts:
    """As the data gives them."""
    count = BATCH + (AHEAD if step == 0 else -AHEAD if step == STEPS - 1 else 0)
    return prompts((3,) * count, step=step, seed=step)


class Data(DataSource):
    def __init__(self) -> None:
        """Gives what ``of_step`` gives."""

    def prompts_of(self, keys: NDArray[np.int64]) -> Prompts:
        return Prompts.joined([of_step(step).take(np.array([prompt])) for step, prompt, _ in keys.tolist()])


def check(steps: list[Rollouts]) -> None:
    for out in steps:
        numbers = out.keys[:, 0] * 1000 + out.keys[:, 1] * 10 + out.keys[:, 2]
        assert (np.diff(numbers) > 0).all(), "in the order of keys"
        assert out.keys[:, 2].tolist() == list(range(SAMPLING.group_size)) * BATCH, "groups are whole"
        for row, key in enumerate(out.keys):
            assert out.response_ids[row].tolist() == response(key)
            assert out.finished[row] == (response(key)[-1] == 0)
            assert out.texts[row] == str(response(key))
            versions = out.versions[row]
            assert (np.diff(versions) >= 0).all()
            assert versions[0] >= key[0], "no token is older than its prompt"
            assert out.logprobs[row].tolist() == (-versions.astype(np.float32)).tolist()
    given = [tuple(key) for out in steps for key in out.keys[:, :2].tolist()]
    asked = [tuple(key) for step in range(STEPS) for key in of_step(step).keys[:, :2].tolist()]
    assert sorted({*given}) == asked
    assert len(given) == len(asked) * SAMPLING.group_size


def go(
    workers: Threads, first: int = 0, operation: Overcommitted | None = None, end: int = STEPS
) -> tuple[list[Rollouts], Overcommitted]:
    writing = Writing("rollout", workers)
    operation = operation or Overcommitted(GENERATE, BATCH, Data())
    out = []
    for step in range(first, end):
        for engine in workers.engines:
            engine._version = step
        out.append(operation.run(writing, of_step(step)))
        writing.renewed()
    return out, operation


@pytest.mark.parametrize("room", [(16, 10_000), (5, 10_000), (16, 90)])
@pytest.mark.parametrize("engines", [1, 3])
def test_every_prompt_once_and_whole(engines: int, room: tuple[int, int]) -> None:
    workers = Threads([Stepwise(spec(), room) for _ in range(engines)])
    steps, operation = go(workers)
    check(steps)
    begun = [each for engine in workers.engines for each in engine.begun]
    assert any(tokens for _, tokens in begun), "what was broken off goes on"
    assert any(len(set(out.versions[row].tolist())) > 1 for out in steps for row in range(len(out)))
    assert operation._prompts is None
    assert operation._begun is None
    assert "write_rows" not in {method for _, method in workers.calls}


def test_what_is_begun_comes_first() -> None:
    workers = Threads([Stepwise(spec(), (3, 10_000))])
    _, operation = go(workers, end=1)
    assert operation._begun is not None
    workers.engines[0].begun.clear()
    go(workers, 1, operation, 2)
    steps = [step for (step, _, _), _ in workers.engines[0].begun]
    assert 0 < steps.count(0) < len(steps)
    assert steps == sorted(steps)


class Dying(Stepwise):
    """Fails when it is to tell for the ``at``-th time what it has done, or when it is to stop, or at its end."""

    at = 3
    when = "write"

    def _fail(self, when: str) -> None:
        if when == self.when:
            self.at -= 1
            if self.at <= 0:
                raise EngineError("it died")

    def write(self, rows: bytes, enough: int) -> Progress:
        self._fail("write")
        return super().write(rows, enough)

    def stop(self) -> None:
        self._fail("stop")
        super().stop()

    def finish(self) -> Rollouts | None:
        self._fail("finish")
        return super().finish()


@pytest.mark.parametrize(("when", "at"), [("write", 1), ("write", 4), ("stop", 1), ("finish", 1), ("finish", 2)])
def test_what_an_engine_that_fails_had_written_is_written_again(when: str, at: int) -> None:
    class Here(Dying):
        pass

    Here.when, Here.at = when, at
    dying = Here(spec())
    workers = Threads([Stepwise(spec()), dying])
    steps, _ = go(workers)
    check(steps)
    assert workers.engines[1] is not dying


def test_saved_and_restored(tmp_path: Path) -> None:
    """Between any two steps; with one engine, whose steps repeat themselves."""
    whole, _ = go(Threads([Stepwise(spec())]))
    for step in range(1, STEPS):
        folder = tmp_path / str(step)
        folder.mkdir()
        first, operation = go(Threads([Stepwise(spec())]), end=step)
        operation.save(folder)
        restored = Overcommitted(GENERATE, BATCH, Data())
        restored.restore(folder)
        rest, _ = go(Threads([Stepwise(spec())]), step, restored)
        for one, other in zip([*first, *rest], whole, strict=True):
            assert one.keys.tolist() == other.keys.tolist()
            assert one.texts == other.texts
            assert one.rows == other.rows
            for name in ("prompt_ids", "response_ids", "logprobs", "versions"):
                assert getattr(one, name).values.tolist() == getattr(other, name).values.tolist(), name
                assert getattr(one, name).offsets.tolist() == getattr(other, name).offsets.tolist()


def test_when_all_engines_have_failed_it_is_an_error() -> None:
    class Here(Dying):
        at = 2

    with pytest.raises(EngineError, match="it died"):
        go(Threads([Here(spec()) for _ in range(2)]))
