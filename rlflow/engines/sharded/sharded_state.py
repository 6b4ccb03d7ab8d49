"""The values that a rank trains where torch shards the weights: a range of the rows of each.

Of a weight whose columns are cut, tensor-parallel ranks exchange their parts, so that files have ranges of rows alone.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.shard_values import local_values
from rlflow.engines.sharded.trained_state import MOMENTS, WEIGHTS, TrainedState
from rlflow.system.compat.torch import shard_range

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


class ShardedState(TrainedState):
    """The ranges of weights and moments that this rank trains, as torch shards them."""

    def __init__(self, spec: EngineSpec, weights: "Mapping[str, Parameter]", optimizer: Any) -> None:
        super().__init__(spec, weights, optimizer)
        self._restored: dict[tuple[str, str], Tensor] = {}
        """The ranges that a checkpoint has for weights whose columns are cut."""

    def get_range(self, name: str) -> tuple[int, int]:
        """Return the start and the size of this rank's rows in a flattened weight. The size may be zero."""
        weight: Any = self._weights[name]
        shape, offsets = shard_range(weight, _by_rows(weight))
        return offsets[0] * prod(weight.shape[1:]), prod(shape)

    def get_values(self, name: str, kind: str) -> "Tensor":
        """Return this rank's range of a weight or of one of its moments.

        All ranks of a replica call this at the same time.
        """
        values = self._values(name, kind)
        return local_values(values.redistribute(placements=_by_rows(values))).reshape(-1)

    def set_values(self, name: str, kind: str, values: "Tensor") -> None:
        """Give this rank's range of a weight or moment other values, which ``update_model`` completes."""
        target = self._values(name, kind)
        if _by_rows(target) == target.placements:
            local_values(target).view(-1).copy_(values)
        else:
            self._restored[name, kind] = values

    def update_model(self) -> None:
        """Exchange the parts of weights whose columns are cut. All ranks call this at the same time."""
        import torch
        from torch.distributed.tensor import DTensor

        for kind in (WEIGHTS, *MOMENTS) if self.num_steps else (WEIGHTS,):
            for name in self.names_of(kind):
                target = self._values(name, kind)
                rows = _by_rows(target)
                if rows == target.placements:
                    continue
                shape, _ = shard_range(target, rows)
                values = self._restored.get((name, kind), torch.empty(0)).view(shape).to(target.device)
                whole = DTensor.from_local(
                    values, target.device_mesh, rows, shape=target.shape, stride=target.stride(), run_check=False
                )
                local_values(target).copy_(local_values(whole.redistribute(placements=target.placements)))

    def names_to_write(self) -> Sequence[str]:
        """Return the weights of which this rank writes its range, which may be empty: the first of all copies."""
        return [name for name, weight in self._weights.items() if _is_first(weight.device_mesh)]

    def _values(self, name: str, kind: str) -> Any:
        weight = self._weights[name]
        return weight.detach() if kind == WEIGHTS else self._torch_optimizer.state[weight][kind]


def _by_rows(weight: Any) -> tuple[Any, ...]:
    """Return the placements of a weight's rows among the ranks that have parts of its rows or columns."""
    from torch.distributed.tensor import Shard

    return tuple(Shard(0) if place in (Shard(1), Shard(2)) else place for place in weight.placements)


def _is_first(mesh: Any) -> bool:
    """Return whether a mesh of ranks has the first replica, and the first of those that are tensor-parallel."""
    return 0 in mesh.mesh and ("replicate" not in mesh.mesh_dim_names or mesh.get_local_rank("replicate") == 0)
