"""Adapters on their way to vLLM's ranks, which read them from files of peft's form."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.adapters import write_adapters
from rlflow.engines.serving.shared_files import memory_folder
from rlflow.errors import RecipeError
from rlflow.resources.memory.phases import LORA_RANKS
from rlflow.resources.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor


def max_lora_rank(spec: EngineSpec, lora: Lora) -> int:
    """As vLLM is told it. Raises RecipeError for one that is too large."""
    if lora.rank > LORA_RANKS[-1]:
        raise RecipeError(
            f"roles.{spec.role}",
            f"vLLM takes no adapters of rank {lora.rank} over: {LORA_RANKS[-1]} is the most",
            fix=f"a lora.rank of {LORA_RANKS[-1]} of the role that it follows, or engine: transformers",
        )
    return next(rank for rank in LORA_RANKS if rank >= lora.rank)


@contextmanager
def adapter_files(lora: Lora, weights: "Iterable[tuple[str, Tensor]]") -> Iterator[str]:
    """A folder in shared memory, there only inside."""
    with tempfile.TemporaryDirectory(prefix="rlflow-adapters-", dir=memory_folder()) as folder:
        write_adapters(Path(folder), lora, dict(weights), None)
        yield folder
