"""The values that a rank trains where torch shards the weights: a range of the rows of each."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from rlflow.engines.sharded.shard_values import local_values
from rlflow.engines.sharded.trained_state import WEIGHTS, TrainedState
from rlflow.system.compat.torch import shard_offsets

if TYPE_CHECKING:
    from torch import Tensor


class ShardedState(TrainedState):
    """The ranges of weights and moments that this rank trains, as torch shards them."""

    def get_range(self, name: str) -> tuple[int, int]:
        """Return the start and the size of this rank's rows in a flattened weight. The size may be zero."""
        weight: Any = self._weights[name]
        first_row = shard_offsets(weight)[0]
        return first_row * prod(weight.shape[1:]), local_values(weight).numel()

    def get_values(self, name: str, kind: str) -> "Tensor":
        """Return this rank's range of a weight or of one of its moments: a view of the values that it trains."""
        weight: Any = self._weights[name]
        values = weight if kind == WEIGHTS else self._torch_optimizer.state[weight][kind]
        return local_values(values.detach()).view(-1)

    def names_to_write(self) -> Sequence[str]:
        """Return the weights of which this rank writes its range: all replicas have the same values."""
        return [name for name, weight in self._weights.items() if self._is_first(weight) and self.get_range(name)[1]]

    @staticmethod
    def _is_first(weight: Any) -> bool:
        mesh = weight.device_mesh
        return "replicate" not in mesh.mesh_dim_names or mesh.get_local_rank("replicate") == 0
