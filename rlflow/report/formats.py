"""Times, sizes and costs as texts."""

from rlflow.compiler.plan import format_duration
from rlflow.resources.layout import GIB

PRICE_UNIT = "in the currency of price_per_hour"
"""The unit of prices: recipes and clusters state them in any currency."""
# Seconds. Longer times are in minutes, hours or days.
_LONG = 600.0


def format_seconds(value: float) -> str:
    """Format a time with two or three digits: 0.012 s, 1.2 s, 123 s."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"


def format_time(seconds: float) -> str:
    """Format a time: seconds below ten minutes, then minutes, hours or days."""
    return format_seconds(seconds) if seconds < _LONG else format_duration(seconds)


def format_range(seconds: float, around: tuple[float, float]) -> str:
    """Format a time with the range around it: "97.6 s (72.2 s to 239 s)"."""
    show = format_seconds if seconds < _LONG else format_duration
    return f"{show(seconds)} ({show(around[0])} to {show(around[1])})"


def format_gpu_hours(hours: float) -> str:
    """Format GPU-hours with three digits, or all before the point."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:.0f}"


def format_size(count: float) -> str:
    """Format a number of bytes."""
    scale, name = next((u, n) for u, n in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u or n == "KiB")
    return f"{count / scale:.3g} {name}" if count < 1000 * scale else f"{count / scale:.0f} {name}"
