"""How large a setting of a role should be, found while a run goes: pure, told what each step took.

The first steps are the trials. None is thrown away: what training comes to does not depend on how a batch is cut.
"""

from dataclasses import dataclass
from math import ceil

# A setting is raised, or lowered, by so much at a time.
_FACTOR = 1.5
# What is gained is more than noise when throughput grows by more than this.
_GAIN = 1.03
# Steps of each trial, of which the fastest counts; and, when adapting, steps between two rounds of trials.
_STEPS, _REST = 2, 20
# Of the memory, the share up to which a setting is tried, and from which on it is lowered.
_ROOM, _FULL = 0.9, 0.97


@dataclass(frozen=True, kw_only=True)
class Trial:
    setting: int
    tokens_per_second: float
    memory_share: float
    """Of the fullest GPU or host, at the peak; 1 where there was too little."""


class Climb:
    """Raises a setting while throughput grows and memory allows, and keeps the best.

    With ``adaptive`` it tries again every so many steps, upwards and downwards, and gives way when memory gets short.
    """

    def __init__(self, start: int, least: int, most: int, *, adaptive: bool = False) -> None:
        self.setting = start
        """For the next step."""
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self._least, self._most = min(start, least), max(start, most)
        self._adaptive = adaptive
        self._ways = [_FACTOR]
        self._rates: list[float] = []
        self._used = 0.0
        self._is_warm = False

    @property
    def trying(self) -> bool:
        """Whether a trial goes on."""
        return bool(self._ways)

    def told(self, tokens: float, seconds: float, memory_share: float) -> None:
        """Of a step with ``setting``: the role's own seconds. A share of 1 says that memory ran out."""
        if memory_share >= 1:
            self._ran_out()
            return
        if not self._is_warm:
            # The first step loads, compiles and grows its buffers.
            self._is_warm = True
            return
        self._rates.append(tokens / seconds)
        self._used = max(self._used, memory_share)
        if self.trying and len(self._rates) >= _STEPS:
            self._judge()
        elif self._adaptive and not self.trying:
            if memory_share > _FULL:
                self._ran_out()
            elif len(self._rates) >= _REST:
                # Lengths change as a model learns: what it did of late is what others are compared with.
                self._ways, self.best = [_FACTOR, 1 / _FACTOR], None
                self._judge()

    def _judge(self) -> None:
        trial = Trial(
            setting=self.setting, tokens_per_second=max(self._rates[-_STEPS:]), memory_share=round(self._used, 4)
        )
        self.trials.append(trial)
        if self.best is None:
            self.best = trial
        elif trial.tokens_per_second > _GAIN * self.best.tokens_per_second:
            # Having gone one way, the other leads back.
            self.best, self._ways = trial, self._ways[:1]
        else:
            self._ways.pop(0)
        self._go()

    def _go(self) -> None:
        """To the next trial; when there is none, back to the best."""
        assert self.best is not None
        self._rates, self._used = [], 0.0
        while self._ways:
            tried = min(self._most, max(self._least, ceil(self.best.setting * self._ways[0])))
            if tried != self.best.setting and self._has_room(tried):
                self.setting = tried
                return
            self._ways.pop(0)
        self.setting = self.best.setting

    def _has_room(self, setting: int) -> bool:
        """By the line through the last two trials; with one alone, as if all memory grew with the setting."""
        here = self.best
        assert here is not None
        if setting < here.setting:
            return True
        before = [trial for trial in self.trials if trial.setting < here.setting and trial.memory_share < 1]
        slope = here.memory_share / here.setting
        if before:
            last = max(before, key=lambda trial: trial.setting)
            slope = max(0.0, here.memory_share - last.memory_share) / (here.setting - last.setting)
        return here.memory_share + slope * (setting - here.setting) <= _ROOM

    def _ran_out(self) -> None:
        """Below what was too much from now on."""
        self.trials.append(Trial(setting=self.setting, tokens_per_second=0.0, memory_share=1.0))
        self._most = max(self._least, ceil(self.setting / _FACTOR))
        if self.best is None or self.best.setting > self._most:
            self.best, self.setting = None, self._most
            self._ways = [_FACTOR]
            self._rates, self._used = [], 0.0
        else:
            self._ways = []
            self._go()
