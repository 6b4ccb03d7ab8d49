"""Torch's caching allocator: what it takes from a GPU besides the tensors that are alive."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Allocator:
    """The habits of the allocator, as shares of what a step allocates and frees."""

    fragmentation: float = 0.12
    """Gaps between tensors, which nothing else can use. NeMo-RL measured 71.2 GiB reserved for 62.5 GiB in use, state
    included, with packed micro-batches (NVIDIA-NeMo/RL, pull request 3476)."""
    cached: float = 1.0
    """Of the memory that earlier moments of a step used, the share that stays reserved beside the memory of its peak.

    A segment that was allocated for one tensor is seldom used for a larger one. The allocator returns free segments to
    the GPU when it runs out of memory, so that this share decides what is measured and not what fits.
    """
    cached_alone: float = 1.0
    """The same on a single GPU, whose gradients and optimizer use smaller tensors on a single stream."""

    def kept(self, *, shards: bool) -> float:
        """Return the share that stays reserved; ``shards``: the role's state is divided over GPUs."""
        return self.cached if shards else self.cached_alone


ALLOCATOR = Allocator()
