"""Compilation of a model's decoder layers, and of functions, by torch.compile; and the recomputation of layers.

Importing this file imports torch and transformers.
"""

import os
import shutil
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.attention import has_varlen_kernel
from rlflow.engines.vision.base import find_family
from rlflow.resources.time.passes import MIN_COMPILED_WIDTH

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@cache
def can_compile(device_type: str) -> bool:
    """Return whether torch.compile makes kernels for this device: for GPUs, with Triton and the C compiler it needs.

    ``TORCH_COMPILE_DISABLE=1`` turns it off, as it does in all of torch.
    """
    has_compiler = any(os.environ.get("CC") or shutil.which(name) for name in ("cc", "gcc", "clang"))
    is_disabled = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"
    return device_type == "cuda" and find_spec("triton") is not None and has_compiler and not is_disabled


def pays_to_compile(spec: EngineSpec, model: "PreTrainedModel") -> bool:
    """Return whether compiled layers make a role's passes faster.

    Without a kernel for segments of different lengths, the shapes of attention would be those of padded blocks, new for
    every pass. DeepSpeed's ZeRO 3 gathers weights by hooks inside a layer, and tensor-parallel ranks add up values in
    it. How many tokens an expert gets is known only when a layer runs.
    """
    device, hidden_size = torch.device(spec.device), model.config.get_text_config().hidden_size
    has_kernel = has_varlen_kernel(getattr(torch, spec.model.dtype), device)
    is_small = hidden_size < MIN_COMPILED_WIDTH
    is_gathered = spec.layout.zero_stage == 3 and spec.layout.num_replicas is None
    exchanges = spec.layout.tensor_parallel_size > 1
    # The weights of all experts of a layer are one tensor.
    has_experts = any(weight.dim() == 3 for weight in model.parameters())
    return has_kernel and can_compile(device.type) and not (is_small or is_gathered or exchanges or has_experts)


def compile_layers(model: "PreTrainedModel", backend: str = "inductor") -> None:
    """Compile the decoder layers of a model of transformers at their first call, once for all lengths of streams.

    The layers share the compiled code, which takes their weights as arguments. What is recomputed in the backward pass
    is compiled too: checkpointing is around a layer.
    """
    for layer in decoder_layers(model):
        layer.compile(backend=backend, dynamic=True)


def checkpoint_layers(model: "PreTrainedModel", num_kept: int) -> None:
    """Have the backward pass recompute the decoder layers, except the last ``num_kept``.

    Their activations are the first to be freed, before the others are computed again.
    """
    model.gradient_checkpointing_enable()
    layers = decoder_layers(model)
    for layer in layers[len(layers) - num_kept :]:
        layer.gradient_checkpointing = False


def decoder_layers(model: "PreTrainedModel") -> list[GradientCheckpointingLayer]:
    """Return the decoder layers of a model of transformers, without those that encode images."""
    family = find_family(model.config.model_type)
    return [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, GradientCheckpointingLayer) and (family is None or family.part_of(name) == "language")
    ]
