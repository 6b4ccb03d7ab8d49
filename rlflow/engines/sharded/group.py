"""The processes of a role: how they meet, and how they share sequences."""

from typing import TYPE_CHECKING

from rlflow.engines.base import EngineSpec
from rlflow.errors import EngineError
from rlflow.resources.models.architecture import heads_divide

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlflow.engines.causal_lm.scoring import Spread


def meet(spec: EngineSpec) -> None:
    """Waits for the other workers of the role. Raises EngineError when this process is of another group already."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        place = distributed.get_rank(), distributed.get_world_size()
        if place != (spec.rank, spec.world_size):
            raise EngineError(
                f"role {spec.role}: this process is rank {place[0]} of {place[1]} of another role already, "
                f"and cannot be rank {spec.rank} of {spec.world_size}."
            )
        return
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{spec.address}",
        rank=spec.rank,
        world_size=spec.world_size,
    )


def spread_of(spec: EngineSpec, model: "PreTrainedModel") -> "Spread | None":
    """How neighbouring ranks share each sequence, if they do. Called by all ranks of the role together.

    Raises EngineError for a model whose attention cannot be shared by so many.
    """
    size = spec.layout.sequence_parallel_size
    if size == 1:
        return None
    from rlflow.engines.sharded.ulysses import Ulysses

    heads = model.config.num_attention_heads
    keys = getattr(model.config, "num_key_value_heads", heads)
    if not heads_divide(heads, keys, size) or spec.world_size % size:
        raise EngineError(
            f"role {spec.role}: sequence_parallel_size {size} does not divide {heads} attention heads "
            f"({keys} of keys and values) and {spec.world_size} ranks."
        )
    return Ulysses(size)
