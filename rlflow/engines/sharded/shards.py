"""Loading a model of which each rank reads its shards alone, and weights that no checkpoint has: heads and adapters.

New weights are created in host memory, whole and by the role's seed, so that they are the same however they are
sharded.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.adapters import add_adapters, base_names, is_adapter
from rlflow.engines.sharded.mesh import Meshes, shard_model
from rlflow.engines.sharded.shard_values import fill_shard
from rlflow.system.compat.transformers import cut_when_loaded, initialize_head, keep_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


class MeshShards:
    """The shards of a model on a mesh, with its adapters."""

    def __init__(self, spec: EngineSpec, meshes: Meshes, compute_dtype: "torch.dtype") -> None:
        self._spec, self._meshes, self._compute_dtype = spec, meshes, compute_dtype
        self._new_values: dict[str, Tensor] = {}
        """The values of weights that a checkpoint may lack, by their names."""

    def cut(self, model: Any) -> None:
        """Add the adapters and shard the model, whose weights may be without values."""
        # Before it is loaded, weights are apart that will be one.
        model.tie_weights()
        # peft takes some meshes for those of tensor parallelism, so adapters come before the shards.
        with _without_meta(model):
            add_adapters(model, self._spec)
        self._new_values = {name: weight.detach() for name, weight in model.named_parameters() if is_adapter(name)}
        if (head := getattr(model, "score", None)) is not None and head.weight.is_meta:
            self._new_values |= {f"score.{name}": value for name, value in self._new_head(model, head).items()}
        for name in self._new_values:
            keep_values(model.get_submodule(name.rpartition(".")[0]))
        shard_model(model, self._meshes, self._compute_dtype)

    def _new_head(self, model: Any, head: Any) -> "dict[str, Tensor]":
        """Return the weights of a new value or reward head."""
        import torch

        new = torch.nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")
        new.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            initialize_head(model, new)
        return {name: weight.detach().to(head.weight.dtype) for name, weight in new.named_parameters()}

    def loading(self) -> AbstractContextManager[dict[str, Any]]:
        """Make ``from_pretrained`` cut a model before it reads the weights; yields arguments for it."""
        return cut_when_loaded(self.cut, base_names)

    def fill(self, model: Any, missing: Collection[str]) -> Collection[str]:
        """Give new weights their values, as far as a checkpoint lacks them; return their names."""
        import torch

        names = self._new_values.keys() & missing
        with torch.no_grad():
            for name in names:
                fill_shard(model.get_parameter(name), self._new_values[name])
        return {name for name in names if is_adapter(name)}


@contextmanager
def _without_meta(model: "Module") -> Iterator[None]:
    """Let weights without values be on the CPU, where they take no memory: new weights beside them get values then."""
    import torch

    meta = {
        (module, name): weight
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.is_meta
    }
    for (module, name), weight in meta.items():
        empty = torch.empty((), dtype=weight.dtype).expand(weight.shape)
        setattr(module, name, torch.nn.Parameter(empty))
    yield
    for (module, name), weight in meta.items():
        weight.requires_grad = getattr(module, name).requires_grad
        setattr(module, name, weight)
