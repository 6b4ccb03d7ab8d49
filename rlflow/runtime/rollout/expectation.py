"""How long responses will be, from those that are done and those that are still being written.

The hazard of ending is measured over the tokens that all samples have written (Nelson and Aalen's estimator, in which
samples that still run count as far as they are), and each group has a factor on it: a gamma frailty (Vaupel, Manton and
Stallard 1979), whose posterior mean is the ends that the group has had over those that it was to have. A group that
writes on and ends less often than others is a long one; that holds whatever the form of the distribution.

Shapes: G groups, R rows, E edges, F points in the future.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Ends that a group is taken to have had, as many as it was to have, before anything is known of it: the inverse of the
# variance of the factors.
_PRIOR_ENDS = 2.0
# Responses whose word is taken for what was expected beforehand.
_PRIOR_ROWS = 16.0
_EDGES, _FUTURE = 65, 24
# How far above the expected use of the cache there must be room, in standard deviations. More leaves room unused, less
# has samples put off (``benchmarks/tail.py``).
DEVIATIONS = 1.0
# Likewise for the last samples of a step: one that begins late costs more than one that is put off.
LAST_DEVIATIONS = 0.5


class Expectation:
    """Of the responses of one step."""

    def __init__(self, groups: Ints, max_tokens: int, before: Floats | None = None) -> None:
        """``groups`` [R]; ``before``: lengths that came in the step before, and without them as long as is allowed."""
        self._groups = groups
        self._max_tokens = max_tokens
        self._num_groups = int(groups.max(initial=-1)) + 1
        # Narrow where the most end.
        self._edges = max_tokens * np.linspace(0, 1, _EDGES) ** 2
        self._future = max_tokens * np.linspace(0, 1, _FUTURE + 1)[1:] ** 2
        lengths = np.array([max_tokens], np.float64) if before is None or not len(before) else before
        self._prior_ends, self._prior_tokens = self._counted(lengths, lengths < max_tokens)
        scale = _PRIOR_ROWS / len(lengths)
        self._prior_ends, self._prior_tokens = self._prior_ends * scale, self._prior_tokens * scale
        self._hazard = np.zeros(_EDGES)
        self.factors: Floats = np.ones(self._num_groups)
        """[G]: how often the samples of a group end, over how often others do. The longest has the smallest."""
        none = np.zeros(0, np.int64)
        self.learn(none, none.astype(np.float64), none.astype(np.bool_))

    def learn(self, rows: Ints, tokens: Floats, done: NDArray[np.bool_]) -> None:
        """Of all ``rows`` begun so far, the tokens that each has written, and whether that was all."""
        # What is cut at the limit has not come to its end.
        done = done & (tokens < self._max_tokens)
        ends, exposure = self._counted(tokens, done)
        rates = (ends + self._prior_ends) / np.maximum(exposure + self._prior_tokens, 1e-9)
        self._hazard = np.concatenate([[0.0], np.cumsum(rates * np.diff(self._edges))])
        groups = self._groups[rows]
        expected = np.bincount(groups, np.interp(tokens, self._edges, self._hazard), self._num_groups)
        seen = np.bincount(groups, done, self._num_groups)
        self.factors = (seen + _PRIOR_ENDS) / (expected + _PRIOR_ENDS)

    def use(self, rows: Ints, prompts: Ints, tokens: Floats, left: Ints) -> tuple[Floats, Floats]:
        """Mean and variance of the tokens that rows hold in the cache at some moments to come, [R, F] each.

        [R] each: their prompts' tokens, those that they have written, and those that they may still write.
        """
        ahead, alive = self._alive(rows, tokens, left)
        # What reaches its limit between two of the moments is counted at the second.
        before = np.concatenate([[0.0], self._future[:-1]])
        alive *= before < left[:, None]
        held = (prompts + tokens)[:, None] + ahead
        return held * alive, held**2 * alive * (1 - alive)

    def left(self, rows: Ints, tokens: Floats, left: Ints) -> Floats:
        """The mean of the tokens that will still be written of each row, [R]."""
        ahead, alive = self._alive(rows, tokens, left)
        alive = np.concatenate([np.ones((len(rows), 1)), alive], 1)
        widths = np.diff(ahead, axis=1, prepend=0.0)
        means: Floats = (widths * (alive[:, 1:] + alive[:, :-1]) / 2).sum(1)
        return means

    def _alive(self, rows: Ints, tokens: Floats, left: Ints) -> tuple[Floats, Floats]:
        """Moments to come, at most those at which rows reach their limits, and the chance that rows are written still,
        [R, F] each."""
        ahead = np.minimum(self._future, left[:, None])
        now = np.interp(tokens, self._edges, self._hazard)
        later = np.interp(tokens[:, None] + ahead, self._edges, self._hazard)
        return ahead, np.exp(-self.factors[self._groups[rows], None] * (later - now[:, None]))

    def _counted(self, tokens: Floats, done: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Ends within each interval, and tokens written in it, [E - 1] each."""
        widths = np.diff(self._edges)
        places = np.clip(np.searchsorted(self._edges, tokens, side="left") - 1, 0, _EDGES - 2)
        ends = np.bincount(places[done], minlength=_EDGES - 1).astype(np.float64)
        inside = np.bincount(places, tokens - self._edges[places], _EDGES - 1)
        beyond = len(tokens) - np.cumsum(np.bincount(places, minlength=_EDGES - 1))
        return ends, inside + beyond * widths
