"""The DeepSpeed engine: trains, scores and values in one of the processes that share a model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from rlflow.batch import Sequences
from rlflow.engines.base import ALL_TRANSPORTS, EngineKind, EngineSpec
from rlflow.engines.causal_lm.micro_batches import Index, build_equal_micro_batches
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.engines.sharded.cpu_offload import OffloadedMemory, optimizer_tensors, weight_tensors
from rlflow.engines.sharded.loading import load_sharded
from rlflow.engines.sharded.process_group import set_timeouts, wait_for_files
from rlflow.engines.sharded.settings import TRAINING_MEMORY, deepspeed_config, init_deepspeed
from rlflow.engines.trainer import TrainingEngine

if TYPE_CHECKING:
    from torch import Tensor

# The bytes of weights that are gathered at a time.
_GATHERED_BYTES = 256 * 2**20


class DeepSpeedEngine(TrainingEngine):
    """The engine for models whose state is sharded over several GPUs.

    Each rank has its share of the rows. ZeRO shards the optimizer's state (1), also the gradients (2), and also the
    weights (3). bfloat16 weights have float32 masters. A role that is not trained has no optimizer, and only ZeRO 3
    shards it. Sequence-parallel ranks are neighbours with the same rows, and each computes on a part of their tokens.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        init_deepspeed(spec)
        self._stage = spec.layout.zero_stage or 0
        self._config = deepspeed_config(spec, trains=self._trains)
        model = load_sharded(spec, self._config)
        # Ranks read at different speeds, and DeepSpeed's first collective has torch's default time-out.
        wait_for_files()
        self._use_model(model)
        self._engine: Any = self._initialize() if self._trains or self._stage == 3 else None
        if self._engine is not None:
            self._called_model, self._optimizer = self._engine, self._engine.optimizer
        self._offloaded_weights, self._offloaded_state = OffloadedMemory(self._device), OffloadedMemory(self._device)
        if self._trains:
            self._check_weights("after loading")
        set_timeouts(spec)

    def _initialize(self) -> Any:
        import deepspeed

        trainable = (weight for weight in self._model.parameters() if weight.requires_grad)
        optimizer = self._build_optimizer(trainable) if self._trains else None
        return deepspeed.initialize(model=self._model, optimizer=optimizer, config=self._config)[0]

    def _cut(self, sequences: Sequences) -> tuple[list[Index], int]:
        """Return as many micro-batches on every rank."""
        return build_equal_micro_batches(sequences, self._spec.layout.micro_batch_tokens)

    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        """Leave the gradients in DeepSpeed's buffers."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages the ranks' gradients, but this loss is a sum over the ranks.
        self._engine.backward(total * self._spec.world_size)

    def _step(self, totals: LossTotals) -> tuple[dict[str, float], float]:
        means = weighted_means(self._sum_over_ranks(totals.sums))
        # Without a finite loss no gradient is, and DeepSpeed drops them only in its step.
        norm = self._clip_and_step()
        totals.check(means["loss"], self._gather_problems)
        return means, norm

    def _clip_and_step(self) -> float:
        """Clip the gradients and step; return their norm before clipping.

        Where the norm is not finite, all ranks drop the gradients, and weights and optimizer stay as they are.
        """
        import torch

        limit = self._spec.optimizer.max_grad_norm
        if self._config["gradient_clipping"]:
            # DeepSpeed itself checks the norm over all ranks.
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            # Some of its optimizers return -1 for a norm that is not finite.
            return norm if norm >= 0 else inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit))
        if isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def _gather_problems(self, problem: str | None) -> list[str | None]:
        """Return the problem that each rank found."""
        import torch

        problems: list[str | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(problems, problem)
        return problems

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sum over all shares of the data, each of which sequence-parallel ranks count several times."""
        import torch

        totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(totals)
        totals /= self._spec.layout.sequence_parallel_size
        return dict(zip(sums, totals.tolist(), strict=True))

    @staticmethod
    def _local_values(weight: Any) -> "Tensor":
        """Return the values of a weight that this rank has: all of them, or its shard under ZeRO 3, without padding."""
        if not hasattr(weight, "ds_tensor"):
            full: Tensor = weight
            return full
        shard: Tensor = weight.ds_tensor.view(-1)
        # The padding after the last value of the last shard is uninitialized memory.
        return shard[: max(0, weight.ds_numel - shard.numel() * weight.ds_zero_partition_rank)]

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the weights that ZeRO 3 has left gathered."""
        self._drop_gathered()
        super().release_memory()

    def _drop_gathered(self) -> None:
        if self._stage == 3:
            self._engine.empty_partition_cache()

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
            # The state includes views of the weights, so both are offloaded before the weights return.
            self.sleep()
        self._offloaded_weights.restore()
        if not weights_only:
            self._offloaded_state.restore()

    def _offload(self) -> None:
        if not self._offloaded_weights.num_bytes:
            self._offloaded_weights.offload(weight_tensors(self._model))
        if not self._offloaded_state.num_bytes:
            self._offloaded_state.offload(optimizer_tensors(self._optimizer))

    def _gather(self, weights: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        """Yield the full values, gathered group by group: a tensor is valid until the next one is requested."""
        import deepspeed

        for group in _gather_groups(weights.items()):
            sharded = [weight for _, weight in group if hasattr(weight, "ds_id")]
            with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
                for name, weight in group:
                    yield name, weight.detach()


def _gather_groups(weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[list[tuple[str, Tensor]]]":
    """Yield the weights in order, in groups of about ``_GATHERED_BYTES``."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in weights:
        nbytes = int(getattr(weight, "ds_numel", weight.numel())) * weight.element_size()
        if group and size + nbytes > _GATHERED_BYTES:
            yield group
            group, size = [], 0
        group.append((name, weight))
        size += nbytes
    yield group


ENGINE = EngineKind(
    engine=DeepSpeedEngine,
    parallel=frozenset({"data", "sequence"}),
    package="deepspeed",
    training_memory={"float32": replace(TRAINING_MEMORY, weights=4, logits=8), "bfloat16": TRAINING_MEMORY},
    sends_weights_by=ALL_TRANSPORTS,
)
