"""Compiled decoder layers: the operations between the matrix products of a layer become a few kernels.

Importing this file imports torch and transformers.
"""

import torch
from torch.nn import Module
from transformers.modeling_layers import GradientCheckpointingLayer

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.attention import has_varlen_kernel

# A smaller model makes a step in less time than compiling takes.
_MIN_HIDDEN_SIZE = 512


def pays_to_compile(spec: EngineSpec, hidden_size: int) -> bool:
    """Return whether compiled layers make a role's passes faster.

    Without a kernel for segments of different lengths, the shapes of attention would be those of padded blocks, new for
    every pass. Under ZeRO 3 weights are gathered by hooks inside a layer.
    """
    has_kernel = has_varlen_kernel(getattr(torch, spec.model.dtype), torch.device(spec.device))
    return has_kernel and spec.layout.zero_stage != 3 and hidden_size >= _MIN_HIDDEN_SIZE


def compile_layers(model: Module, backend: str = "inductor") -> None:
    """Compile the decoder layers of a model of transformers at their first call, once for all lengths of streams.

    The layers share the compiled code, which takes their weights as arguments. What is recomputed in the backward pass
    is compiled too: checkpointing is around a layer.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend=backend, dynamic=True)
