"""Metrics of nodes that show that a model learns nothing, if they stay as they are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alarm:
    """A metric of a node, and the value beyond which the run should warn."""

    metric: str
    """Its name below the node's: ``finished`` for ``rollouts/finished``."""
    fact: str
    """A sentence about such a value, for the warning."""
    least: float = float("-inf")
    """A smaller value is an alarm."""
    most: float = float("inf")
    """A larger value is an alarm."""

    def is_raised(self, value: float) -> bool:
        """Return whether a value is outside of the bounds."""
        return not self.least <= value <= self.most


NO_RESPONSE_ENDS = Alarm("finished", "every response is cut at max_tokens, before its end", least=1e-9)
REWARDS_ARE_EQUAL = Alarm("zero", "all responses to each prompt earn the same, and nothing is learned", most=1 - 1e-9)
POLICY_ALARMS: tuple[Alarm, ...] = (
    Alarm("entropy", "the policy always takes the same tokens, and tries nothing else", least=1e-4),
    Alarm("kl", "the policy is more than a nat per token away from its reference", most=1.0),
    Alarm("sampler_difference", "the engines that sample and train differ more than by rounding in bfloat16", most=0.1),
)
