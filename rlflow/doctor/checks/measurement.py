"""The result of a check: one measured value, and the value that was expected."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """A measured value beside the expected one, both as text."""

    name: str
    measured: str
    expected: str
    passed: bool

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, unit: str = "") -> "Measurement":
        """Return a measurement that passes when ``value`` is finite and not above ``limit``."""
        return cls(name, f"{value:.3g}{unit}", f"at most {limit:.3g}{unit}", value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, unit: str = "") -> "Measurement":
        """Return a measurement that passes when ``value`` is not below ``limit``."""
        return cls(name, f"{value:.3g}{unit}", f"at least {limit:.3g}{unit}", value >= limit)
