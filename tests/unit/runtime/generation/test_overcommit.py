"""Prompts begun before their step: here over engines that are threads, and whose responses are known beforehand."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.data.source import DataSource
from rlflow.errors import EngineError
from rlflow.nodes.generate import Generate
from rlflow.runtime.generation.engine_group import EngineGroup
from rlflow.runtime.generation.overcommit import OvercommittedGenerate
from tests.helpers import prompts, spec
from tests.stepwise import MAX_TOKENS, Dying, Stepwise, response
from tests.unit.runtime.ray.test_role_proxy import Threads

BATCH, AHEAD, STEPS = 6, 3, 6
GENERATE = Generate(max_tokens=MAX_TOKENS, group_size=3, overcommit=0.5)
SAMPLING = GENERATE.sampling


def of_step(step: int) -> Prompts:
    """Return the prompts of a step as the data gives them."""
    count = BATCH + (AHEAD if step == 0 else -AHEAD if step == STEPS - 1 else 0)
    return prompts((3,) * count, step=step, seed=step)


class Data(DataSource):
    def __init__(self) -> None:
        """Give the prompts of ``of_step``."""

    def prompts_with_keys(self, keys: NDArray[np.int64]) -> Prompts:
        return Prompts.concatenate([of_step(step).take(np.array([prompt])) for step, prompt, _ in keys.tolist()])


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
    workers: Threads, first: int = 0, operation: OvercommittedGenerate | None = None, end: int = STEPS
) -> tuple[list[Rollouts], OvercommittedGenerate]:
    writing = EngineGroup("rollout", workers, lambda: writing.weights_synced())
    operation = operation or OvercommittedGenerate(GENERATE, BATCH, Data())
    out = []
    for step in range(first, end):
        for engine in workers.engines:
            engine._version = step
        out.append(operation.run(writing, of_step(step)))
        writing.weights_synced()
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
    assert operation._partial is None
    assert "generate_rows" not in {method for _, method in workers.calls}


def test_partial_rollouts_resume_first() -> None:
    workers = Threads([Stepwise(spec(), (3, 10_000))])
    _, operation = go(workers, end=1)
    assert operation._partial is not None
    workers.engines[0].begun.clear()
    go(workers, 1, operation, 2)
    steps = [step for (step, _, _), _ in workers.engines[0].begun]
    assert 0 < steps.count(0) < len(steps)
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("when", "at"), [("advance", 1), ("advance", 4), ("preempt", 1), ("finish_session", 1), ("finish_session", 2)]
)
def test_samples_of_a_failed_engine_are_generated_again(when: str, at: int) -> None:
    class Here(Dying):
        pass

    Here.when, Here.at = when, at
    dying = Here(spec())
    workers = Threads([Stepwise(spec()), dying])
    steps, _ = go(workers)
    check(steps)
    assert workers.engines[1] is not dying


class Late(Stepwise):
    """An engine that finishes all its samples just before it would preempt them."""

    def preempt(self, rows: bytes) -> Rollouts | None:
        with self._lock:
            live, self._live = self._live, []
        for answer, written in live:
            written.ids += written.left
            written.length += len(written.left)
            written.left, written.is_done = [], True
            answer.set_result(written)
        return super().preempt(rows)


@pytest.mark.parametrize("tries", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_sample_that_finishes_before_its_preemption_appears_once(tries: int) -> None:
    """In some runs, depending on the turns of threads, an engine has preempted the sample before."""
    for _ in range(tries):
        first, operation = go(Threads([Stepwise(spec(), (16, 90))]), end=2)
        rest, _ = go(Threads([Late(spec(), (16, 90))]), 2, operation)
        check([*first, *rest])


def test_saved_and_restored(tmp_path: Path) -> None:
    """The state is saved between any two steps. A single engine makes the steps repeatable."""
    whole, _ = go(Threads([Stepwise(spec())]))
    for step in range(1, STEPS):
        folder = tmp_path / str(step)
        folder.mkdir()
        first, operation = go(Threads([Stepwise(spec())]), end=step)
        operation.save(folder)
        restored = OvercommittedGenerate(GENERATE, BATCH, Data())
        restored.restore(folder)
        rest, _ = go(Threads([Stepwise(spec())]), step, restored)
        for one, other in zip([*first, *rest], whole, strict=True):
            assert one.keys.tolist() == other.keys.tolist()
            assert one.texts == other.texts
            assert one.rows == other.rows
            for name in ("prompt_ids", "response_ids", "logprobs", "versions"):
                assert getattr(one, name).values.tolist() == getattr(other, name).values.tolist(), name
                assert getattr(one, name).offsets.tolist() == getattr(other, name).offsets.tolist()


def test_when_new_engines_fail_too_it_is_an_error() -> None:
    class Here(Dying):
        at = 1

    with pytest.raises(EngineError, match="it died"):
        go(Threads([Here(spec()) for _ in range(2)]))


@pytest.mark.parametrize("at", [3, 8])
def test_when_all_engines_have_failed_new_ones_write_all_of_it(at: int) -> None:
    """The partial rollouts of earlier steps are lost with the engine that had them."""

    class Here(Dying):
        left = 1

        def _fail(self, when: str) -> None:
            if Here.left:
                try:
                    super()._fail(when)
                except EngineError:
                    Here.left = 0
                    raise

    Here.at = at
    dying = Here(spec())
    workers = Threads([dying])
    steps, _ = go(workers)
    assert workers.engines[0] is not dying
    keys = [out.keys[:, :2] for out in steps]
    assert [len(each) for each in keys] == [BATCH * SAMPLING.group_size] * STEPS
    given = {tuple(key) for each in keys for key in each.tolist()}
    assert len(given) == BATCH * STEPS, "every prompt is trained on once"
