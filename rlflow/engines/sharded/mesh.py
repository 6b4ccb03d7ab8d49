"""The ranks of a role as a mesh, and a model whose weights torch shards over it (FSDP, in several replicas HSDP).

Ranks are ordered by replica, then by share of the data, then by part of a sequence. All ranks of a replica shard the
weights together, and their gradients are sums, as rlflow's losses are.
"""

import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.compilation import decoder_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def create_mesh(spec: EngineSpec) -> "DeviceMesh":
    """Return the mesh of all ranks of a role; all of them call this at the same time."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    replicas = spec.layout.num_replicas or 1
    sizes = {"replicate": replicas} if replicas > 1 else {}
    sizes["fsdp"] = spec.world_size // replicas
    return init_device_mesh(torch.device(spec.device).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_model(model: "PreTrainedModel", mesh: "DeviceMesh", compute_dtype: "torch.dtype") -> None:
    """Shard the weights of each layer together, and those of embeddings, output layer and the rest.

    A pass gathers them in ``compute_dtype``, and gradients are reduced in float32. Tied weights stay with the rest,
    which is gathered from the first layer to the last.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # The scores of a pass are a view, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    chain: list[Any] = list(decoder_layers(model))
    if head is not None and head.weight is not embeddings.weight:
        chain = [embeddings, *chain, head]
    for module in (*chain, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module, following in pairwise(chain):
        module.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The default divides by the number of ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def local_values(weight: "Tensor") -> "Tensor":
    """Return the values of a weight that this rank has."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_values(weight: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Return a weight in ``dtype``, gathered from the ranks of a replica, which all call this at the same time."""
    from torch.distributed.tensor import DTensor

    values = weight.detach().to(dtype)
    return values.full_tensor() if isinstance(values, DTensor) else values


def fill_shard(weight: "Tensor", values: "Tensor") -> None:
    """Give a sharded weight this rank's part of ``values``, which all ranks have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(weight, DTensor)
    shard = distribute_tensor(values.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
    local_values(weight.detach()).copy_(shard.to_local())
