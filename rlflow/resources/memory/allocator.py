"""Torch's caching allocator: what it takes from a GPU besides the tensors that are alive."""

from dataclasses import dataclass

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import Terms


@dataclass(frozen=True)
class Allocator:
    """The habits of the allocator, as shares of what a step allocates and frees."""

    fragmentation: float
    """Gaps between tensors at the peak of a step, which nothing else can use."""
    between_logits: float
    """The same for logits, which are few and large."""
    cached: float
    """The share of what other moments of the step needed that stays reserved beside the memory of its peak.

    A segment that was allocated for one tensor is seldom used for a larger one. The allocator returns free segments to
    the GPU when it runs out of memory, so that this share decides what is measured and not what fits.
    """

    def gaps(self, moving: Terms) -> float:
        """Return the size of the gaps at a moment."""
        logits = moving["logits"]
        return self.fragmentation * (sum(moving.values()) - logits) + self.between_logits * logits


# With LoRA and a chunked loss a step has one peak: nvidia-smi shows 8 to 14% of what moves more than torch allocates on
# one A100, besides the context and NCCL (six runs of fms-acceleration), and 13 to 21% on two and four (fifteen runs).
# With 31 GiB of logits besides, it shows no more on one GPU, and at least 19% of everything that moves on several.
# NeMo-RL measured 71.2 GiB reserved for 62.5 in use (NVIDIA-NeMo/RL, pull request 3476).
ALONE = Allocator(fragmentation=0.1, between_logits=0.0, cached=0.125)
"""On a single GPU. ``cached`` is fitted to published runs (benchmarks/published/leave_one_out.py)."""
SHARDED = Allocator(fragmentation=0.18, between_logits=0.18, cached=0.25)
"""On several GPUs, where collectives have streams, and blocks of memory, of their own; fitted in the same way."""


def allocator_of(layout: Layout) -> Allocator:
    """Return the allocator's habits for a role that trains or scores."""
    return SHARDED if layout.num_gpus > 1 else ALONE
