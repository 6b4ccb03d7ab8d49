"""Processes that answer nothing, or make no progress, are ended; slow ones are left alone."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rlflow.errors import EngineError
from rlflow.runtime.objects.object_process import Pulse
from rlflow.runtime.ray import watchdog
from rlflow.runtime.ray.cluster.services import Outage
from rlflow.runtime.ray.waits import Wait
from rlflow.runtime.ray.watchdog import Watchdog


class Process:
    """A process that answers as long as it ``is_alive``, and makes a step with every answer if it ``steps``."""

    name, host = "role actor: worker 1 on host-1", "node-1"

    def __init__(self, is_alive: bool = True, steps: bool = False) -> None:
        self.is_alive, self.steps = is_alive, steps
        self.asked = 0
        self.pid: int | None = None
        self.calls: list[Future[Any]] = []
        self.error: EngineError | None = None

    def ask(self) -> "Future[Pulse]":
        self.asked += 1
        answer: Future[Pulse] = Future()
        if self.is_alive:
            self.pid = 4711
            answer.set_result(Pulse(self.pid, self.asked if self.steps else 7))
        return answer

    def end(self, error: EngineError) -> None:
        self.error = error
        for call in self.calls:
            if not call.done():
                call.set_exception(error)


class Site:
    """A watchdog with a clock of its own, and services that fail as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.state = Outage()
        self.silence: list[Callable[[], bool]] = []
        """Answers of the control service, the next one last; without any it answers."""
        self.watchdog = Watchdog(self, lambda: self.now)

    def outage(self) -> Outage:
        return self.state

    def control_answers(self) -> bool:
        return not self.silence or self.silence.pop()()

    def call(self, process: Process, **limits: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        process.calls.append(future)
        limits = {"silence_s": 20.0, "limit_s": 3600.0, **limits}
        self.watchdog.watch(process, future, Wait(method="update", node="update", samples="4 rows", **limits))
        return future

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.watchdog.look_at_calls()
            self.watchdog.look_at_services()

    def seconds_until_ended(self, process: Process) -> int:
        for second in range(1, 10_000):
            self.pass_time(1)
            if process.error:
                return second
        raise AssertionError("the process was not ended")


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_silent_process_is_ended_in_time(site: Site) -> None:
    process = Process(is_alive=False)
    call = site.call(process)
    assert site.seconds_until_ended(process) == 20
    text = str(call.exception())
    assert text.startswith(
        "role actor: worker 1 on host-1 has not answered for 20 s. Node update waits for its 'update'"
    )
    assert text.endswith("of 4 rows.")


def test_one_that_is_stopped_at_work_is_named_with_its_process_id(site: Site) -> None:
    process = Process()
    site.call(process)
    site.pass_time(500)
    assert process.error is None
    process.is_alive = False
    # The last answer may be almost five seconds old, and the question that a stopped process got is never answered.
    assert 15 <= site.seconds_until_ended(process) <= 21
    assert "(pid 4711) has not answered for 20 s" in str(process.error)


def test_a_slow_process_that_answers_has_an_hour(site: Site) -> None:
    process = Process()
    site.call(process)
    assert site.seconds_until_ended(process) == 3600
    assert "answers, but has not finished a call within 3600 s" in str(process.error)


def test_a_call_that_loads_may_be_silent_for_longer(site: Site) -> None:
    """The limit is the longest of all calls of the process."""
    process = Process(is_alive=False)
    site.call(process)
    site.call(process, silence_s=300.0)
    assert site.seconds_until_ended(process) == 300


def test_a_process_is_asked_every_five_seconds_while_the_run_waits_for_it(site: Site) -> None:
    process = Process()
    call = site.call(process)
    site.pass_time(60)
    assert process.asked == 12
    call.set_result(None)
    site.pass_time(60)
    assert process.asked == 12


@pytest.mark.parametrize(("counts_steps", "questions"), [(True, 12), (False, 0)])
def test_short_calls_are_questions_themselves_unless_they_wait_for_samples(
    counts_steps: bool, questions: int, site: Site
) -> None:
    process = Process(steps=True)
    for _ in range(60):
        call = site.call(process, counts_steps=counts_steps)
        site.pass_time(1)
        call.set_result(None)
    assert process.asked == questions


@pytest.mark.parametrize("steps", [True, False])
def test_an_engine_must_make_steps(steps: bool, site: Site) -> None:
    process = Process(steps=steps)
    site.call(process, counts_steps=True)
    seconds = site.seconds_until_ended(process)
    if steps:
        assert seconds == 3600
    else:
        # The first answer, at the fifth second, counts as a step.
        assert 600 <= seconds <= 607
        assert "has made no step for 600 s" in str(process.error)


def test_an_engine_that_gets_a_call_every_second_must_make_steps_too(site: Site) -> None:
    """The calls of a generation return after a second, whether the engine has made a step or not."""
    hung, working = Process(), Process(steps=True)
    start = site.now
    while not hung.error and site.now < start + 700:
        calls = [site.call(process, counts_steps=True) for process in (hung, working)]
        site.pass_time(1)
        for call in calls:
            if not call.done():
                call.set_result(None)
    assert 600 <= site.now - start <= 612
    assert "has made no step for 600 s" in str(hung.error)
    assert working.error is None


@pytest.mark.parametrize("pause", [5, 9, 60])
def test_time_without_samples_does_not_count_for_steps(pause: int, site: Site) -> None:
    """An engine is built for half an hour, gets weights for another, and rests between short calls."""
    process = Process()
    for _ in range(2):
        other = site.call(process, silence_s=1e9, limit_s=1e9)
        site.pass_time(1800)
        other.set_result(None)
        for _ in range(50):
            site.pass_time(pause)
            call = site.call(process, counts_steps=True)
            site.pass_time(5)
            call.set_result(None)
            assert process.error is None


@pytest.mark.parametrize("calls_first", [True, False])
def test_a_stop_of_this_process_counts_for_nobody_and_only_once(calls_first: bool, site: Site) -> None:
    """A call that begins after the stop, before the watchdog has looked, has not been delayed."""
    process = Process(is_alive=False)
    site.pass_time(1)
    if calls_first:
        site.call(process)
    site.now += 3600
    if not calls_first:
        site.call(process)
    assert 19 <= site.seconds_until_ended(process) <= 21


def test_new_calls_do_not_put_it_off(site: Site) -> None:
    process = Process(is_alive=False)
    site.call(process)
    for _ in range(19):
        site.pass_time(1)
        site.call(process).set_result(None)
    assert site.seconds_until_ended(process) == 1


def test_a_watch_that_fails_ends_the_calls(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the run would wait for a process that hangs, and nobody would notice."""

    def fail() -> Outage:
        raise RuntimeError("the address of the service has changed")

    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(site, "outage", fail)
    call = site.call(Process())
    with site.watchdog.running(), pytest.raises(EngineError, match="the address of the service has changed"):
        call.result(timeout=30)


def test_nobody_is_asked_without_calls(site: Site) -> None:
    process = Process()
    site.call(process).set_result(None)
    site.pass_time(100)
    assert process.asked == 0


def test_a_stop_of_this_process_is_nobody_elses_fault(site: Site) -> None:
    """Ctrl-Z and a laptop that sleeps stop this process in this way."""
    process = Process()
    site.call(process)
    site.pass_time(7)
    site.now += 7200
    site.pass_time(60)
    assert process.error is None


def test_a_lost_host_ends_its_processes_alone(site: Site) -> None:
    here, there = Process(), Process()
    here.host = "node-0"
    calls = [site.call(here), site.call(there)]
    site.state = Outage(hosts={"node-1": "host-1 (10.0.0.2:1) has not answered for 3 s"})
    site.pass_time(1)
    assert not calls[0].done()
    expected = "role actor: worker 1 on host-1 is lost: host-1 (10.0.0.2:1) has not answered for 3 s."
    assert str(calls[1].exception()) == expected


def test_without_ray_all_calls_fail_and_no_new_ones_wait(site: Site) -> None:
    process, later = Process(), Process()
    call = site.call(process)
    site.state = Outage(control="Ray's control service (GCS) at 127.0.0.1:1 has not answered for 5 s")
    site.watchdog.check()
    site.pass_time(1)
    for failed in (call, site.call(later)):
        assert str(failed.exception()) == "Ray's control service (GCS) at 127.0.0.1:1 has not answered for 5 s."
    with pytest.raises(EngineError, match="GCS"):
        site.watchdog.check()


def test_a_control_service_that_is_silent_for_a_moment_is_waited_for(site: Site) -> None:
    site.silence = [lambda: False, lambda: False]
    site.watchdog.check()
    assert not site.silence


def test_a_new_process_is_refused_once_the_silent_control_service_is_given_up(site: Site) -> None:
    """Ray would wait for the service for a minute, and then end this process."""

    def given_up() -> bool:
        site.state = Outage(control="Ray's control service (GCS) at 127.0.0.1:1 has not answered for 5 s")
        site.watchdog.look_at_services()
        return False

    site.silence = [given_up, lambda: False]
    with pytest.raises(EngineError, match="GCS"):
        site.watchdog.check()
    assert not site.silence
