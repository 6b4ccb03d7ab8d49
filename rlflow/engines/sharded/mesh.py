"""The ranks of a role as a mesh, and a model whose weights torch shards over it (FSDP, in several replicas HSDP).

Ranks are ordered by replica, then by share of the data, by part of a sequence, and by part of a layer. All ranks of a
replica shard the weights together, and their gradients are sums, as rlflow's losses are. Groups of neighbours may
divide the experts of a model among them; the ranks with the same experts then shard these.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.shard_values import local_values
from rlflow.engines.vision.base import find_family
from rlflow.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.nn import Parameter
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Meshes:
    """The ranks that share weights."""

    shards: "DeviceMesh"
    """The ranks with the same part of each layer, by replica and shard."""
    tensor: "DeviceMesh | None" = None
    """The ranks of a group that divide layers among them."""
    experts: "DeviceMesh | None" = None
    """The ranks of a group that divide experts among them."""
    expert_shards: "DeviceMesh | None" = None
    """The ranks with the same experts, by replica and shard."""


def create_meshes(spec: EngineSpec) -> Meshes:
    """Return the meshes of a role; all of its ranks call this at the same time."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    device, layout = torch.device(spec.device).type, spec.layout
    size, width = layout.expert_parallel_size, layout.tensor_parallel_size
    ranks = layout.num_shards * width
    if ranks % size:
        fact = f"its {ranks} ranks of a replica cannot be divided into groups of {size} for experts"
        raise EngineError(f"role {spec.role}: {fact}.")
    replicas = [layout.num_replicas] if layout.num_replicas and layout.num_replicas > 1 else []
    names = ("replicate", "fsdp")[1 - len(replicas) :]
    if width == 1:
        meshes = Meshes(init_device_mesh(device, (*replicas, ranks), mesh_dim_names=names))
    else:
        by_part = init_device_mesh(device, (*replicas, ranks // width, width), mesh_dim_names=(*names, "tp"))
        meshes = Meshes(by_part[names], by_part["tp"])
    if size == 1:
        return meshes
    by_expert = init_device_mesh(device, (*replicas, ranks // size, size), mesh_dim_names=(*names, "expert"))
    return replace(meshes, experts=by_expert["expert"], expert_shards=by_expert[names])


def shard_model(model: "PreTrainedModel", meshes: Meshes, compute_dtype: "torch.dtype") -> None:
    """Shard the weights of each layer together, and those of embeddings, output layer and the rest.

    A pass gathers them in ``compute_dtype``, and gradients are reduced in float32. Tied weights stay with the rest,
    which is gathered from the first layer to the last. Weights that encode images stay whole: they run outside of the
    model's own pass, which gathers all others.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from rlflow.engines.causal_lm.compilation import decoder_layers
    from rlflow.engines.sharded.experts import divide_experts, find_experts
    from rlflow.engines.sharded.styles import refuse
    from rlflow.engines.sharded.tensor_parallel import cut_layers

    # Experts are gathered in two steps, first from the ranks that shard them, which torch warns of.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    # The scores of a pass are a view, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    family = find_family(model.config.model_type)
    if meshes.tensor is not None:
        if family is not None:
            refuse(model, "tensor", "it sees images")
        size = 1 if meshes.experts is None else meshes.experts.size()
        if size % meshes.tensor.size() and any(find_experts(model)):
            refuse(model, "tensor", f"groups of {size} ranks for experts do not consist of {meshes.tensor.size()}")
        cut_layers(model, meshes.tensor)
    for experts in find_experts(model) if meshes.experts is not None else ():
        assert meshes.experts is not None
        divide_experts(experts, meshes.experts, meshes.tensor)
        assert meshes.expert_shards is not None
        place = _shared_evenly(meshes.expert_shards)
        fully_shard(experts, mesh=meshes.expert_shards, mp_policy=policy, shard_placement_fn=place)
    whole = {
        weight for name, weight in model.named_parameters() if family is not None and family.part_of(name) != "language"
    }
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    chain: list[Any] = list(decoder_layers(model))
    if head is not None and head.weight is not embeddings.weight:
        chain = [embeddings, *chain, head]
    place = _shared_evenly(meshes.shards)
    for module in (*chain, model):
        fully_shard(module, mesh=meshes.shards, mp_policy=policy, ignored_params=whole, shard_placement_fn=place)
    for module, following in pairwise(chain):
        module.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The default divides by the number of ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shared_evenly(mesh: "DeviceMesh") -> "Callable[[Parameter], Shard | None]":
    """Return a function that chooses the dimension along which ranks share a weight.

    That is the first, or the inputs of each expert where ranks would have uneven numbers of experts, or none.
    """
    from torch.distributed.tensor import Shard

    ranks = mesh.size(mesh.ndim - 1)

    def choose(weight: "Parameter") -> "Shard | None":
        count, *widths = local_values(weight).shape
        is_uneven = len(widths) == 2 and count % ranks > 0
        return Shard(2) if is_uneven and widths[1] % ranks == 0 else None

    return choose
