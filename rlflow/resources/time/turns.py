"""Responses in several turns: what the model reads again, and what it waits for."""

from dataclasses import dataclass

from rlflow.resources.time.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class TurnProfile:
    """The turns of a response. The defaults are those of a response in one piece."""

    count: float = 1.0
    """Turns in which the response is generated."""
    wait_s: float = 0.0
    """The seconds that a sample waits after each turn."""
    observation_tokens: float = 0.0
    """Tokens of the response that are added between two turns, and not generated."""
    segments: float = 1.0
    """Sequences with prompts of their own, which have equal shares of the response."""
    cpu_s: float = 0.0
    """CPU time on the engine's host for each turn."""

    @property
    def added_tokens(self) -> float:
        """Return the tokens of a response that are not generated."""
        return (self.count - 1) * self.observation_tokens

    def steps(self, responses: Lengths, step_s: float) -> Lengths:
        """Return the lengths of responses in decoding steps of ``step_s``, with those that pass in waits."""
        more = self.count * self.wait_s / step_s - self.added_tokens
        return Lengths(tuple(max(1.0, length + more) for length in responses.values)) if more else responses

    def read_tokens(self, prompt: float, responses: Lengths, group_size: float, *, caches: bool) -> float:
        """Return the mean tokens of a response that are read and not generated, in a group that shares its prompt.

        An engine that ``caches`` reads only what is new in a turn, and others read everything before it.
        """
        first = prompt / group_size
        if caches:
            return first + (self.segments - 1) * prompt + self.added_tokens
        return first + (self.count - 1) * (prompt + responses.mean / self.segments / 2)


ONE_TURN = TurnProfile()
