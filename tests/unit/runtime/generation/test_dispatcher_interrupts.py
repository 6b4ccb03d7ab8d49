"""Generations that end before all samples are done, over engines that are threads and whose responses are known."""

from concurrent.futures import Future

import numpy as np
import pytest

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import is_done
from rlflow.runtime.generation.dispatcher import LaterSteps
from rlflow.runtime.generation.engine_group import EngineGroup
from tests.helpers import prompts, spec
from tests.stepwise import MAX_TOKENS, Dying, Stepwise, response
from tests.unit.runtime.ray.test_role_proxy import Threads

STEPS = 3
SAMPLING = Sampling(max_tokens=MAX_TOKENS, group_size=3)
GIVEN = Prompts.concatenate([prompts((3,) * 4, step=step, seed=step) for step in range(STEPS)])


def generate(workers: Threads, partial: Rollouts | None = None) -> Rollouts:
    """Generate until a step is complete, and interrupt the rest."""
    interrupt: Future[None] = Future()

    def on_step(step: int, rollouts: Rollouts) -> None:
        if not interrupt.done():
            interrupt.set_result(None)

    group = EngineGroup("rollout", workers, lambda: group.weights_synced())
    group.weights_synced()
    out = group.generate_ahead(GIVEN, SAMPLING, partial, LaterSteps(interrupt, on_step))
    assert out is not None
    return out


def generate_all(workers: Threads, partial: Rollouts | None = None) -> Rollouts:
    """Resume the generation, with a new version of the weights each time, until all samples are done."""
    for count in range(20):
        for engine in workers.engines:
            engine._version = count
        partial = generate(workers, partial)
        if len(partial) == len(GIVEN) * SAMPLING.group_size and is_done(partial, SAMPLING).all():
            return partial
    raise AssertionError("each generation completes a step, or loses an engine")


def check(out: Rollouts) -> None:
    assert out.keys.tolist() == GIVEN.repeat(SAMPLING.group_size).keys.tolist()
    for row, key in enumerate(out.keys):
        assert out.response_ids[row].tolist() == response(key)
        assert (np.diff(out.versions[row]) >= 0).all()
        assert out.logprobs[row].tolist() == (-out.versions[row].astype(np.float32)).tolist()


@pytest.mark.parametrize("room", [(16, 10_000), (5, 10_000), (16, 90)])
@pytest.mark.parametrize("engines", [1, 3])
def test_interrupted_samples_resume_with_their_tokens(engines: int, room: tuple[int, int]) -> None:
    def has_resumed_samples() -> bool:
        workers = Threads([Stepwise(spec(), room) for _ in range(engines)])
        check(generate_all(workers))
        return any(tokens for engine in workers.engines for _, tokens in engine.begun)

    # Threads may finish all samples before the interrupt reaches them.
    assert any(has_resumed_samples() for _ in range(20))


@pytest.mark.parametrize(
    ("when", "at"),
    [
        ("advance", 1),
        ("advance", 4),
        ("preempt", 1),
        ("take_rollouts", 1),
        ("finish_session", 1),
        ("finish_session", 2),
    ],
)
def test_samples_of_a_failed_engine_are_generated_again(when: str, at: int) -> None:
    class Here(Dying):
        pass

    Here.when, Here.at = when, at

    def has_replaced_engine() -> bool:
        dying = Here(spec())
        workers = Threads([Stepwise(spec()), dying])
        check(generate_all(workers))
        return workers.engines[1] is not dying

    assert any(has_replaced_engine() for _ in range(20))


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
        partial = generate(Threads([Stepwise(spec(), (16, 90))]))
        assert not is_done(partial, SAMPLING).all()
        check(generate_all(Threads([Late(spec(), (16, 90))]), partial))
