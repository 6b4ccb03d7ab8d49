"""Which groups have the longer responses, from those that are done and those that are still being written.

The hazard of ending is measured over the tokens that all samples have written (Nelson and Aalen's estimator, in which
samples that still run count as far as they are), and each group has a factor on it: a gamma frailty (Vaupel, Manton and
Stallard 1979). A group that writes on and ends less often than others is a long one. Who has written much is more often
of a long group, so ends are counted against the factors of those that could have ended; and how much groups differ is
measured too: by the variance of their ends beyond what chance alone would make.

Shapes: G groups, R rows, E edges.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The variance of the groups' factors as it is taken to be before anything is known, the squares of expected ends that
# outweigh that, and its bounds.
_VARIANCE, _VARIANCE_WEIGHT, _LEAST, _MOST = 0.5, 32.0, 1 / 30, 3.0
# Responses of the step before that count like as many of this one.
_PRIOR_ROWS = 128.0
_EDGES = 65
# Each time, hazard and factors are worked out from each other so often. They differ little from the time before.
_ROUNDS = 2
# As good as certain to have ended.
_CERTAIN = 1e6


class Expectation:
    """Of the responses of one step."""

    def __init__(self, groups: Ints, max_tokens: int, before: Floats | None = None) -> None:
        """``groups`` [R]; ``before``: lengths that came in the step before, and without them as long as is allowed."""
        self._groups = groups
        self._max_tokens = max_tokens
        self._num_groups = int(groups.max(initial=-1)) + 1
        # Narrow where the most end.
        self._edges = max_tokens * np.linspace(0, 1, _EDGES) ** 2
        lengths = np.array([max_tokens], np.float64) if before is None or not len(before) else before
        ends, exposure = self._counted(lengths, lengths < max_tokens, np.ones(len(lengths)))
        scale = _PRIOR_ROWS / len(lengths)
        self._prior_ends, self._prior_exposure = ends * scale, exposure * scale
        self._variance = _VARIANCE
        self._hazard = np.zeros(_EDGES)
        self.factors: Floats = np.ones(self._num_groups)
        """[G]: how often the samples of a group end, over how often others do. The longest has the smallest."""
        none = np.zeros(0, np.int64)
        self.learn(none, none.astype(np.float64), none.astype(np.bool_))

    def learn(self, rows: Ints, tokens: Floats, done: NDArray[np.bool_]) -> None:
        """Of all ``rows`` begun so far, the tokens that each has written, and whether that was all."""
        # What is cut at the limit has not come to its end.
        done = done & (tokens < self._max_tokens)
        groups = self._groups[rows]
        seen = np.bincount(groups, done, self._num_groups)
        for _ in range(_ROUNDS):
            ends, exposure = self._counted(tokens, done, self.factors[groups])
            self._hazard = self._summed(ends + self._prior_ends, exposure)
            expected = np.bincount(groups, np.interp(tokens, self._edges, self._hazard), self._num_groups)
            beyond = ((seen - expected) ** 2 - expected).sum() + _VARIANCE_WEIGHT * _VARIANCE
            self._variance = float(np.clip(beyond / ((expected**2).sum() + _VARIANCE_WEIGHT), _LEAST, _MOST))
            self.factors = (seen + 1 / self._variance) / (expected + 1 / self._variance)

    def _summed(self, ends: Floats, exposure: Floats) -> Floats:
        """The hazard up to each edge, [E]."""
        hazard = [0.0]
        for end, here, prior, width in zip(
            ends.tolist(), exposure.tolist(), self._prior_exposure.tolist(), np.diff(self._edges).tolist(), strict=True
        ):
            # Of the step before the groups are not known: only how large the factors are on average of those that have
            # come so far.
            prior /= 1 + self._variance * hazard[-1]
            hazard.append(min(hazard[-1] + end / max(here + prior, 1e-9) * width, _CERTAIN))
        return np.array(hazard)

    def _counted(self, tokens: Floats, done: NDArray[np.bool_], weights: Floats) -> tuple[Floats, Floats]:
        """Ends within each interval, and tokens written in it by their weights, [E - 1] each."""
        size, widths = _EDGES - 1, np.diff(self._edges)
        places = np.clip(np.searchsorted(self._edges, tokens, side="left") - 1, 0, size - 1)
        inside = np.bincount(places, weights * (tokens - self._edges[places]), size)
        beyond = weights.sum() - np.cumsum(np.bincount(places, weights, size))
        return np.bincount(places[done], minlength=size).astype(np.float64), inside + beyond.clip(min=0) * widths
