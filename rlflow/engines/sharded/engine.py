"""A base class for engines whose state is sharded over the ranks of a role."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlflow.batch import Sequences
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.micro_batches import Index, build_equal_micro_batches
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.engines.sharded.cpu_offload import OffloadedMemory
from rlflow.engines.trainer import TrainingEngine

if TYPE_CHECKING:
    from torch import Tensor


class ShardedEngine(TrainingEngine):
    """An engine on several ranks, each with its share of the rows and of the state.

    Sequence-parallel ranks are neighbours with the same rows, and each computes on a part of their tokens.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._offloaded_weights, self._offloaded_state = OffloadedMemory(self._device), OffloadedMemory(self._device)

    def _cut(self, sequences: Sequences) -> tuple[list[Index], int]:
        """Return as many micro-batches on every rank."""
        tokens = self._spec.layout.micro_batch_tokens
        return build_equal_micro_batches(sequences, tokens, self._limit_patches(sequences))

    def _step(self, totals: LossTotals) -> tuple[dict[str, float], float]:
        means = weighted_means(self._sum_over_ranks(totals.sums))
        # Without a finite loss no gradient is, and the library drops them only in its step.
        norm = self._clip_and_step()
        totals.check(means["loss"], self._gather_problems)
        return means, norm

    @abstractmethod
    def _clip_and_step(self) -> float:
        """Clip the gradients and step; return their norm over all ranks before clipping.

        Where the norm is not finite, all ranks drop the gradients, and weights and optimizer stay as they are.
        """

    def _gather_problems(self, problem: str | None) -> list[str | None]:
        """Return the problem that each rank found."""
        import torch

        problems: list[str | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(problems, problem)
        return problems

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sum over all shares of the data, each of which ranks with the same rows count several times."""
        import torch

        totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(totals)
        totals /= self._spec.layout.ranks_per_share
        return dict(zip(sums, totals.tolist(), strict=True))

    @abstractmethod
    def _drop_gathered(self) -> None:
        """Release the weights that the last pass has left gathered."""

    @abstractmethod
    def _weight_tensors(self) -> "Iterable[Tensor]":
        """Return the tensors with the memory of this rank's weights."""

    @abstractmethod
    def _state_tensors(self) -> "Iterable[Tensor]":
        """Return the tensors with the memory of this rank's optimizer state."""

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the weights that are still gathered."""
        self._drop_gathered()
        super().release_memory()

    def sleep(self, discard_weights: bool = False) -> None:
        """Move weights and optimizer state to the host; on a CPU there is no memory to release."""
        assert not discard_weights, "no weight sync replaces the weights of this engine"
        if self._device.type == "cuda":
            self._drop_gathered()
            self._offload()
            super().release_memory()

    def wake(self, weights_only: bool = False) -> None:
        """Move them back; with ``weights_only`` the optimizer's state is on the host afterwards, wherever it was."""
        if weights_only:
            # The state may include views of the weights, so both are offloaded before the weights return.
            self.sleep()
        self._offloaded_weights.restore()
        if not weights_only:
            self._offloaded_state.restore()

    def _offload(self) -> None:
        if not self._offloaded_weights.num_bytes:
            self._offloaded_weights.offload(self._weight_tensors())
        if not self._offloaded_state.num_bytes:
            self._offloaded_state.offload(self._state_tensors())
