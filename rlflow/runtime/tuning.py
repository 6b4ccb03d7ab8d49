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
    """Of the fullest GPU or host, at the peak."""


class Climb:
    """Raises a setting while throughput grows and memory allows, and keeps the best.

    With ``adaptive`` it tries again every so many steps, upwards and downwards, and in between it is lowered in every
    step that leaves next to no memory, until the next round of trials.
    """

    def __init__(self, start: int, least: int, most: int, *, adaptive: bool = False) -> None:
        self.trials: dict[int, Trial] = {}
        """By setting, of each the last."""
        self.best: Trial | None = None
        """None until something has been tried, and for a setting that only memory led to."""
        self._start, self._least, self._most = start, min(start, least), max(start, most)
        self._adaptive = adaptive
        # How often the setting has been raised, less how often lowered; and that of the best.
        self._level = self._best_level = 0
        self._ways = [1]
        self._rates: list[float] = []
        self._used = 0.0
        self._is_warm = False

    @property
    def setting(self) -> int:
        """For the next step."""
        return self._at(self._level)

    @property
    def trying(self) -> bool:
        """Whether a trial goes on."""
        return bool(self._ways)

    def told(self, tokens: float, seconds: float, memory_share: float) -> None:
        """Of a step with ``setting``: the role's own seconds."""
        if not self._is_warm:
            # The first step loads, compiles and grows its buffers.
            self._is_warm = True
            return
        self._rates.append(tokens / seconds)
        self._used = max(self._used, memory_share)
        if self.trying:
            if len(self._rates) >= _STEPS:
                self._judge()
        elif self._adaptive and memory_share > _FULL and self._at(self._level - 1) < self.setting:
            self._level -= 1
            self.best = self.trials.get(self.setting)
            self._rates, self._used = [], 0.0
        elif self._adaptive and len(self._rates) >= _REST:
            # Lengths change as a model learns: what it did of late is what others are compared with.
            self._ways, self.best = [1, -1], None
            self._judge()

    def _at(self, level: int) -> int:
        return min(self._most, max(self._least, ceil(self._start * _FACTOR**level)))

    def _judge(self) -> None:
        trial = Trial(
            setting=self.setting, tokens_per_second=max(self._rates[-_STEPS:]), memory_share=round(self._used, 4)
        )
        self.trials[self.setting] = trial
        if self.best is None:
            self.best, self._best_level = trial, self._level
        elif trial.tokens_per_second > _GAIN * self.best.tokens_per_second:
            # Having gone one way, the other leads back.
            self.best, self._best_level, self._ways = trial, self._level, self._ways[:1]
        else:
            self._ways.pop(0)
        self._go()

    def _go(self) -> None:
        """To the next trial; when there is none, back to the best."""
        assert self.best is not None
        self._rates, self._used = [], 0.0
        while self._ways:
            self._level = self._best_level + self._ways[0]
            if self.setting != self.best.setting and self._has_room(self.best, self.setting):
                return
            self._ways.pop(0)
        self._level = self._best_level

    def _has_room(self, here: Trial, setting: int) -> bool:
        """By the line through ``here`` and the next smaller setting that was tried; where none was, as if all memory
        grew with the setting."""
        if setting < here.setting:
            return True
        smaller = [trial for trial in self.trials.values() if trial.setting < here.setting]
        slope = here.memory_share / here.setting
        if smaller:
            last = max(smaller, key=lambda trial: trial.setting)
            slope = max(0.0, here.memory_share - last.memory_share) / (here.setting - last.setting)
        return here.memory_share + slope * (setting - here.setting) <= _ROOM
