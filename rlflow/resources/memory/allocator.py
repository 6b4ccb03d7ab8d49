"""Torch's caching allocator: what it takes from a GPU besides the tensors that are alive."""

from dataclasses import dataclass

from rlflow.resources.layout import Layout


@dataclass(frozen=True)
class Allocator:
    """The habits of the allocator, as shares of what a step allocates and frees."""

    fragmentation: float
    """Gaps between tensors at the peak of a step, which nothing else can use."""
    cached: float
    """The share of what other moments of the step needed that stays reserved beside the memory of its peak.

    A segment that was allocated for one tensor is seldom used for a larger one. The allocator returns free segments to
    the GPU when it runs out of memory, so that this share decides what is measured and not what fits.
    """


ALONE = Allocator(fragmentation=0.1, cached=0.25)
"""On a single GPU."""
SHARDED = Allocator(fragmentation=0.15, cached=0.5)
"""Where collectives use memory on streams of their own, which the others cannot reuse before they have ended."""


def allocator_of(layout: Layout) -> Allocator:
    """Return the allocator's habits for a role that trains or scores."""
    return SHARDED if layout.num_gpus > 1 else ALONE
