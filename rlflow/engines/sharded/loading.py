"""Weights that no rank holds whole."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec, Head
from rlflow.engines.causal_lm.kernels import attention_of
from rlflow.engines.causal_lm.pretrained import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_sharded(spec: EngineSpec, config: dict[str, Any], *, head: Head) -> "PreTrainedModel":
    """Load the model of a role; weights of a path are sharded as it is built when ``config`` asks for ZeRO 3.

    Rank 0 reads these layer by layer. New ones are drawn whole in the memory of the host, so that they are the same
    however they are sharded.
    """
    import torch

    sharded = config["zero_optimization"]["stage"] == 3
    with _as_transformers_shards(config) if sharded and spec.model.path is not None else nullcontext():
        return load_model(
            spec.model_name,
            spec.model,
            device="cpu" if sharded else spec.device,
            dtype=getattr(torch, spec.model.dtype),
            seed=spec.seed,
            attention=attention_of(spec),
            head=head,
            trains="Trains" in spec.capabilities,
        )


class _Zero3:
    """What transformers asks of DeepSpeed's configuration. Its own class of this needs one more library."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _as_transformers_shards(config: dict[str, Any]) -> Iterator[None]:
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    from rlflow.engines.sharded.layerwise import layer_by_layer

    # It keeps a weak reference.
    asked = _Zero3(config)
    set_hf_deepspeed_config(asked)
    try:
        with layer_by_layer():
            yield
    finally:
        unset_hf_deepspeed_config()
