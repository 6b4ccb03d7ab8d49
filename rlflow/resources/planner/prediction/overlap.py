"""The simulation of generation ahead of training: samples of random lengths, and the rules of the run.

On GPUs of its own, the generating side decodes the samples of all steps that are admitted; the training side takes a
step as soon as it is complete. On shared GPUs the two take turns. What may start with which version, and when weights
move, is as in ``overlap`` of a recipe.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from random import Random
from statistics import fmean

from rlflow.resources.workload import Overlap

# Samples of a step that are simulated, each of which stands for several. More change the result by less than 1%.
_SAMPLES = 256
# Steps that are simulated, and the first of them, in which the pipeline fills.
_STEPS, _WARM_UP = 40, 10


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The generation of a step on all engines together."""

    samples: int
    slots: float
    """Samples that are generated at the same time, or wait for their agents meanwhile, at most."""
    lengths: Sequence[float]
    """Equally likely lengths of responses in decoding steps, with those that pass in waits."""
    token_seconds: Callable[[float], float]
    """The time of a decoding step, by the number of running samples."""
    prefill: float
    """Seconds to read the prompts of a step."""
    prefill_token: float
    """Seconds to read the tokens of one decoding step of a partial rollout again."""
    judging: float = 0.0
    """Seconds from the last response of a step until its samples are judged."""


@dataclass(frozen=True, kw_only=True)
class OverlapTimes:
    """The simulated steps of a run."""

    step_seconds: float
    generate_idle: float
    """The share of the time in which no sample is generated, judged or prepared, and no weights arrive."""
    train_idle: float
    """The share of the time in which nothing is trained and no weights leave."""
    staleness: float
    """The mean number of versions by which the policy that generated a token is older than the one that it trains."""


@dataclass
class _Pool:
    """The samples that are generated, by a clock that counts decoding steps."""

    decoding: Decoding
    share: float
    """Real samples for each simulated one."""
    clock: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)
    """A heap: the clock at which a sample ends, its step, and the clock at which it began."""
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)
    """Unfinished samples of each step."""
    stall: float = 0.0
    """Seconds before the next token."""

    @property
    def is_idle(self) -> bool:
        return not self.left

    def start(self, step: int, lengths: Sequence[float]) -> None:
        self.queue.extend((step, length) for length in lengths)
        self.left[step] = len(lengths)
        self.stall += self.decoding.prefill
        self._fill()

    def interrupt(self) -> None:
        """Read all partial rollouts again."""
        tokens = sum(self.clock - began for _, _, began in self.running)
        self.stall += tokens * self.share * self.decoding.prefill_token

    def advance(self, seconds: float) -> tuple[float, int | None]:
        """Generate until a step is complete, for ``seconds`` at most. Return the seconds, and the complete step."""
        spent = min(self.stall, seconds)
        self.stall -= spent
        while self.running and spent < seconds:
            token_s = self.decoding.token_seconds(len(self.running) * self.share)
            end, step, _ = self.running[0]
            if spent + (end - self.clock) * token_s > seconds:
                self.clock += (seconds - spent) / token_s
                return seconds, None
            spent += (end - self.clock) * token_s
            self.clock = end
            heappop(self.running)
            self.left[step] -= 1
            self._fill()
            if not self.left[step]:
                del self.left[step]
                return spent, step
        return seconds, None

    def _fill(self) -> None:
        while self.queue and (len(self.running) + 1) * self.share <= max(self.decoding.slots, self.share):
            step, length = self.queue.popleft()
            heappush(self.running, (self.clock + length, step, self.clock))


def alone_seconds(decoding: Decoding) -> float:
    """Return the mean time of a step that is generated alone."""
    draw, total = Random(0), 0.0
    for step in range(_WARM_UP):
        pool = _pool(decoding)
        pool.start(step, _lengths(decoding, draw))
        total += pool.advance(float("inf"))[0]
    return total / _WARM_UP + decoding.judging


def simulate_overlap(decoding: Decoding, train: float, sync: float, rules: Overlap) -> OverlapTimes:
    """Simulate steps that train for ``train`` seconds each, and copy their weights in ``sync`` seconds."""
    draw, pool = Random(0), _pool(decoding)
    waits, exact = rules.in_flight == "wait", rules.deterministic
    now, version, trained, started = 0.0, 0, 0, 0
    training: float | None = None
    judging: list[tuple[float, int]] = []
    complete: set[int] = set()
    began_with: dict[int, list[int]] = {}
    busy = {"generate": 0.0, "train": 0.0}
    at, ages = [0.0], list[float]()
    while trained < _STEPS:
        # New weights, where both sides allow it.
        may_generate = range(started, version + rules.max_staleness + 1)
        is_between = pool.is_idle and not judging if waits else True
        if training is None and trained > version and is_between and not (exact and may_generate):
            now += sync
            busy = {side: seconds + sync for side, seconds in busy.items()}
            version = trained
            if not waits:
                pool.interrupt()
            for step in pool.left:
                began_with[step].append(version)
            may_generate = range(started, version + rules.max_staleness + 1)
        loads_first = training is None and trained > version and not (exact and may_generate)
        if may_generate and not loads_first and (not waits or (pool.is_idle and not judging)):
            for step in may_generate[:1] if waits else may_generate:
                pool.start(step, _lengths(decoding, draw))
                began_with[step] = [version]
                started = step + 1
        if training is None and trained in complete and not (exact and trained > version):
            training = now + train
            versions = began_with.pop(trained)
            ages.append(trained - sum(versions) / len(versions))
        # The next event: the trainer is done, a step is judged, or its last response ends.
        until = min([training or float("inf"), *(ready for ready, _ in judging)])
        generating = bool(pool.left)
        spent, done = pool.advance(until - now)
        busy["generate"] += spent if generating or (waits and judging) else 0.0
        busy["train"] += spent if training is not None else 0.0
        now += spent
        if done is not None:
            judging.append((now + decoding.judging, done))
        complete |= {step for ready, step in judging if ready <= now}
        judging = [waiting for waiting in judging if waiting[0] > now]
        if training is not None and training <= now:
            training, trained = None, trained + 1
            at.append(now)
            if trained == _WARM_UP:
                busy = dict.fromkeys(busy, 0.0)
    took = at[_STEPS] - at[_WARM_UP]
    return OverlapTimes(
        step_seconds=took / (_STEPS - _WARM_UP),
        generate_idle=max(0.0, 1 - busy["generate"] / took),
        train_idle=max(0.0, 1 - busy["train"] / took),
        staleness=sum(ages[_WARM_UP:]) / len(ages[_WARM_UP:]),
    )


def simulate_turns(decoding: Decoding, train: float, sync: float, rules: Overlap) -> OverlapTimes:
    """Simulate the same steps on shared GPUs.

    A turn generates until its step is complete, or with ``in_flight: wait`` all steps that it may.
    """
    draw, pool = Random(0), _pool(decoding)
    waits, together = rules.in_flight == "wait", rules.max_staleness + 1
    # Steps that differ from turn to turn count equally often.
    counted = ceil((_STEPS - _WARM_UP) / together) * together
    now, started, judged = 0.0, 0, 0.0
    at, ages = [0.0], list[float]()
    complete: set[int] = set()
    began_with: dict[int, list[int]] = {}
    for step in range(_WARM_UP + counted):
        if step == _WARM_UP:
            judged = 0.0
        if step not in complete:
            now += sync
            pool.interrupt()
            for later in range(started, step + together):
                pool.start(later, _lengths(decoding, draw))
            started = step + together
            for unfinished in pool.left:
                began_with.setdefault(unfinished, []).append(step)
            while pool.left if waits else step not in complete:
                spent, done = pool.advance(float("inf"))
                now += spent
                complete |= {done} if done is not None else set()
            now += decoding.judging
            judged += decoding.judging
        ages.append(step - fmean(began_with.pop(step)))
        now += train
        at.append(now)
    took = at[-1] - at[_WARM_UP]
    return OverlapTimes(
        step_seconds=took / counted,
        generate_idle=judged / took,
        train_idle=judged / took,
        staleness=fmean(ages[_WARM_UP:]),
    )


def _pool(decoding: Decoding) -> _Pool:
    return _Pool(decoding, decoding.samples / min(_SAMPLES, decoding.samples))


def _lengths(decoding: Decoding, draw: Random) -> list[float]:
    return draw.choices(decoding.lengths, k=min(_SAMPLES, decoding.samples))
