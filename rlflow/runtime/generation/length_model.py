"""A model of which groups have the longer responses, learned from finished and unfinished samples.

The hazard of ending is measured over the tokens that all samples have generated (the Nelson-Aalen estimator, in which a
running sample counts up to its current length). Each group has a factor on it: a gamma frailty (Vaupel, Manton and
Stallard 1979). A group that keeps generating and ends less often than others is a long one.

A sample with many tokens more often belongs to a long group, so ends are counted against the factors of the samples
that could have ended. How much groups differ is measured as well: by the variance of their ends beyond that of chance.

Shapes: G groups, R rows, E edges.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The variance of the groups' factors before anything is known, the squares of expected ends that outweigh it, and its
# bounds.
_VARIANCE, _VARIANCE_WEIGHT, _LEAST, _MOST = 0.5, 32.0, 1 / 30, 3.0
# The responses of the step before count as much as this many of this step.
_PRIOR_ROWS = 128.0
_EDGES = 65
# How often an update computes hazard and factors from each other. They differ little from those of the last update.
_ROUNDS = 2
# The hazard at which a response has ended for certain.
_CERTAIN = 1e6


class LengthModel:
    """The expected lengths of the responses of one step."""

    def __init__(self, groups: Ints, max_tokens: int, previous_lengths: Floats | None = None) -> None:
        """Take the group of each row [R], and lengths of the step before; without any, ``max_tokens`` is expected."""
        self._groups = groups
        self._max_tokens = max_tokens
        self._num_groups = int(groups.max(initial=-1)) + 1
        # Narrow where most responses end.
        self._edges = max_tokens * np.linspace(0, 1, _EDGES) ** 2
        lengths = previous_lengths
        if lengths is None or not len(lengths):
            lengths = np.array([max_tokens], np.float64)
        ends, exposure = self._count(lengths, lengths < max_tokens, np.ones(len(lengths)))
        scale = _PRIOR_ROWS / len(lengths)
        self._prior_ends, self._prior_exposure = ends * scale, exposure * scale
        self._variance = _VARIANCE
        self._hazard = np.zeros(_EDGES)
        self.factors: Floats = np.ones(self._num_groups)
        """[G]: how often the samples of a group end, relative to others. The longest group has the smallest factor."""
        none = np.zeros(0, np.int64)
        self.update(none, none.astype(np.float64), none.astype(np.bool_))

    def update(self, rows: Ints, tokens: Floats, done: NDArray[np.bool_]) -> None:
        """Learn from all rows that were started: the generated tokens of each, and whether it is finished."""
        # A response that is cut off at the limit has not come to its end.
        done = done & (tokens < self._max_tokens)
        groups = self._groups[rows]
        seen = np.bincount(groups, done, self._num_groups)
        for _ in range(_ROUNDS):
            ends, exposure = self._count(tokens, done, self.factors[groups])
            self._hazard = self._cumulative_hazard(ends + self._prior_ends, exposure)
            expected = np.bincount(groups, np.interp(tokens, self._edges, self._hazard), self._num_groups)
            beyond = ((seen - expected) ** 2 - expected).sum() + _VARIANCE_WEIGHT * _VARIANCE
            self._variance = float(np.clip(beyond / ((expected**2).sum() + _VARIANCE_WEIGHT), _LEAST, _MOST))
            self.factors = (seen + 1 / self._variance) / (expected + 1 / self._variance)

    def _cumulative_hazard(self, ends: Floats, exposure: Floats) -> Floats:
        """Return the cumulative hazard up to each edge [E]."""
        hazard = [0.0]
        for end, here, prior, width in zip(
            ends.tolist(), exposure.tolist(), self._prior_exposure.tolist(), np.diff(self._edges).tolist(), strict=True
        ):
            # The groups of the step before are not known: only the mean factor of the responses that reach this edge.
            prior /= 1 + self._variance * hazard[-1]
            hazard.append(min(hazard[-1] + end / max(here + prior, 1e-9) * width, _CERTAIN))
        return np.array(hazard)

    def _count(self, tokens: Floats, done: NDArray[np.bool_], weights: Floats) -> tuple[Floats, Floats]:
        """Return the ends within each interval, and the weighted tokens generated in it, [E - 1] each."""
        size, widths = _EDGES - 1, np.diff(self._edges)
        places = np.clip(np.searchsorted(self._edges, tokens, side="left") - 1, 0, size - 1)
        inside = np.bincount(places, weights * (tokens - self._edges[places]), size)
        beyond = weights.sum() - np.cumsum(np.bincount(places, weights, size))
        return np.bincount(places[done], minlength=size).astype(np.float64), inside + beyond.clip(min=0) * widths
