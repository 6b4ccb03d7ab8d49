"""A watchdog for the processes of a run: no call is waited for without end.

A process that was stopped, or whose host hangs, is reported by nobody: Ray sees a process with an open connection. So
this process asks each process that it waits for whether it lives. The question is answered in a thread of its own, so
a slow process answers while it works, and only one that is stopped or hangs completely stays silent. ``waits`` says how
long a process may be silent, and how long a call may take of a process that answers.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.errors import EngineError, first_line
from rlflow.runtime.objects.object_process import Pulse
from rlflow.runtime.ray.cluster.services import Outage
from rlflow.runtime.ray.waits import Wait

# Seconds between two looks at all calls, and between two questions to one process.
LOOK_S = 1.0
ASK_S = 5.0
# A process is remembered for so many seconds after its last call: an engine with samples gets one every second.
_REMEMBERED_S = 10.0
# An engine that has unfinished samples and makes no step for so long hangs. vLLM allows 300 s for a step of its own
# ranks, and all that takes long (loading, compiling, recording CUDA graphs) happens before the first step.
NO_STEP_S = 600.0
# Seconds between two questions to a control service that does not answer.
_POLL_S = 0.25
# A look that comes so late shows that this process itself was stopped or had no CPU, so nobody else is late.
_OWN_DELAY_S = 5.0


class WatchedProcess(Protocol):
    """A process that calls are made to."""

    name: str
    host: str
    """The id of its Ray node."""
    pid: int | None
    """Its process id, once it has answered."""

    def ask(self) -> "Future[Pulse]":
        """Ask the process for a sign of life."""

    def end(self, error: EngineError) -> None:
        """Kill the process. All its calls fail with ``error``."""


class Services(Protocol):
    """The services of Ray that a run depends on."""

    def outage(self) -> Outage:
        """Return what does not answer. Takes a few seconds at most."""

    def control_answers(self) -> bool:
        """Return whether the control service answers. Takes a few seconds at most."""


@dataclass
class _Watched:
    """A process with calls that are not done, or were done a moment ago."""

    heard_at: float
    """The time of its last answer, by time.monotonic(); before the first, that of its oldest call."""
    stepped_at: float
    """The time when its number of steps was last seen to change, later by the time without calls that count steps."""
    asked_at: float
    called_at: float
    """The time when its last call was done."""
    counted_at: float
    """The same for its last call that counts steps; before the first, the time when it was first watched."""
    still_s: float = 0.0
    """How long its number of steps had been the same when it last answered in such a call."""
    steps: int | None = None
    question: "Future[Pulse] | None" = None
    """The question that it has not answered."""
    calls: "dict[Future[Any], tuple[float, Wait]]" = field(default_factory=dict)
    """The time at which each call began, and the call itself."""

    def hear(self, now: float) -> None:
        """Note the answer to the last question, if there is one."""
        if self.question is None or not self.question.done():
            return
        if self.question.exception() is None:
            pulse = self.question.result()
            self.heard_at = now
            if pulse.steps != self.steps:
                self.stepped_at, self.steps, self.still_s = now, pulse.steps, 0.0
            elif self.counts_steps:
                self.still_s = now - self.stepped_at
        self.question = None

    @property
    def counts_steps(self) -> bool:
        """Return whether it has a call for samples."""
        return any(wait.counts_steps for _, wait in self.calls.values())

    def begin(self, call: "Future[Any]", wait: Wait, now: float) -> None:
        """Note a call that begins."""
        if not self.calls:
            self.heard_at = now
            # Calls for samples follow each other every second. Any other short call is its own sign of life.
            if not wait.counts_steps:
                self.asked_at = now
        if wait.counts_steps and not self.counts_steps:
            self.stepped_at += now - max(self.counted_at, self.stepped_at)
        self.calls[call] = now, wait

    def end(self, call: "Future[Any]", now: float) -> None:
        """Note a call that is done."""
        _, wait = self.calls.pop(call)
        self.called_at = now
        if wait.counts_steps:
            self.counted_at = now

    def fault(self, now: float) -> str | None:
        """Return why the process must be ended; None for one that may work on."""
        if not self.calls:
            return None
        longest = min(self.calls.values(), key=lambda call: call[0])[1]
        silence = now - self.heard_at
        if silence >= max(wait.silence_s for _, wait in self.calls.values()):
            return f"has not answered for {silence:.0f} s. {longest}"
        if self.counts_steps and self.still_s >= NO_STEP_S:
            return f"has made no step for {NO_STEP_S:g} s. {longest}"
        late = [wait for began, wait in self.calls.values() if now - began >= wait.limit_s]
        return f"answers, but has not finished a call within {late[0].limit_s:g} s. {late[0]}" if late else None

    def is_due(self, now: float) -> bool:
        """Return whether to ask the process now, and note that it is asked."""
        if not self.calls or self.question is not None or now - self.asked_at < ASK_S:
            return False
        self.asked_at = now
        return True

    def excuse(self, seconds: float, now: float) -> None:
        """Leave out a delay that this process itself has caused."""
        # A call that began after the delay has not been delayed.
        self.heard_at = min(self.heard_at + seconds, now)
        self.stepped_at = min(self.stepped_at + seconds, now)
        self.calls = {call: (min(began + seconds, now), wait) for call, (began, wait) in self.calls.items()}


class Watchdog:
    """A watch over all calls of a run, in threads of its own. Methods may be called from several threads."""

    def __init__(self, services: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._services, self._clock = services, clock
        self._lock = threading.Lock()
        self._watched: dict[WatchedProcess, _Watched] = {}
        self._ended = threading.Event()
        self._failure: EngineError | None = None
        self._looked_at = clock()

    @contextmanager
    def running(self) -> Iterator["Watchdog"]:
        """Watch until the end of the block."""
        looks = (self.look_at_calls, self.look_at_services)
        threads = [threading.Thread(target=self._repeat, args=[look], name="watchdog", daemon=True) for look in looks]
        self._looked_at = self._clock()
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def check(self) -> None:
        """Raise EngineError if Ray itself has failed. While its control service is silent, wait until it is given up.

        Call this before Ray starts a process, which waits for that service until Ray ends this process.
        """
        while self._failure is None and not self._services.control_answers():
            if self._ended.wait(_POLL_S):
                break
        if self._failure is not None:
            raise EngineError(str(self._failure))

    def watch(self, process: WatchedProcess, call: "Future[Any]", wait: Wait) -> None:
        """End the process if it stops answering, or takes too long, before ``call`` is done."""
        now = self._clock()
        with self._lock:
            self._watched.setdefault(process, _Watched(now, now, now, now, now)).begin(call, wait, now)
        call.add_done_callback(lambda done: self._forget(process, done))
        if self._failure is not None:
            process.end(self._failure)

    def _forget(self, process: WatchedProcess, call: "Future[Any]") -> None:
        with self._lock:
            self._watched[process].end(call, self._clock())

    def look_at_calls(self) -> None:
        """Note answers, ask again, and end processes that have been silent or busy for too long."""
        now = self._clock()
        delay, self._looked_at = now - self._looked_at - LOOK_S, now
        with self._lock:
            if delay > _OWN_DELAY_S:
                for watched in self._watched.values():
                    watched.excuse(delay, now)
            for process, watched in list(self._watched.items()):
                watched.hear(now)
                if not watched.calls and now - watched.called_at > _REMEMBERED_S:
                    del self._watched[process]
            faults = [(process, watched.fault(now)) for process, watched in self._watched.items()]
            to_ask = [process for process, watched in self._watched.items() if watched.is_due(now)]
        for process in to_ask:
            self._ask(process)
        for process, fault in faults:
            if fault is not None:
                pid = "" if process.pid is None else f" (pid {process.pid})"
                process.end(EngineError(f"{process.name}{pid} {fault}."))

    def look_at_services(self) -> None:
        """End processes whose host is lost, and all of them once Ray itself has failed."""
        if self._failure is not None:
            return
        outage = self._services.outage()
        if outage.control is not None:
            self._give_up(EngineError(f"{outage.control}."))
            return
        for process in self._busy():
            if process.host in outage.hosts:
                process.end(EngineError(f"{process.name} is lost: {outage.hosts[process.host]}."))

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                look()
            except Exception as error:  # whatever it is, nobody else would notice a process that hangs
                self._give_up(EngineError(f"The watch over the run's processes has failed: {first_line(error)}."))
                return

    def _give_up(self, failure: EngineError) -> None:
        """End all processes that the run waits for, now and later."""
        self._failure = failure
        for process in self._busy():
            process.end(failure)

    def _busy(self) -> list[WatchedProcess]:
        """Return the processes with calls that are not done."""
        with self._lock:
            return [process for process, watched in self._watched.items() if watched.calls]

    def _ask(self, process: WatchedProcess) -> None:
        question = process.ask()
        with self._lock:
            if process in self._watched:
                self._watched[process].question = question
