"""The DeepSpeed engine: trains, scores and values in one of the processes that share a model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import ALL_TRANSPORTS, EngineKind, EngineSpec
from rlflow.engines.causal_lm.adapters import add_adapters
from rlflow.engines.sharded.cpu_offload import optimizer_tensors, weight_tensors
from rlflow.engines.sharded.engine import ShardedEngine
from rlflow.engines.sharded.loading import load_sharded
from rlflow.engines.sharded.process_group import set_timeouts, wait_for_files
from rlflow.engines.sharded.settings import TRAINING_MEMORY, deepspeed_config, init_deepspeed
from rlflow.engines.sharded.trained_state import TrainedState

if TYPE_CHECKING:
    from torch import Tensor

# The bytes of weights that are gathered at a time.
_GATHERED_BYTES = 256 * 2**20


class DeepSpeedEngine(ShardedEngine):
    """The engine whose state is sharded, and on demand offloaded, by DeepSpeed.

    ZeRO shards the optimizer's state (1), also the gradients (2), and also the weights (3). bfloat16 weights have
    float32 masters. A role that is not trained has no optimizer, and only ZeRO 3 shards it.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        init_deepspeed(spec)
        self._stage = spec.layout.zero_stage or 0
        self._config = deepspeed_config(spec, trains=self._trains)
        model = load_sharded(spec, self._config)
        # Ranks read at different speeds, and DeepSpeed's first collective has torch's default time-out.
        wait_for_files()
        add_adapters(model, spec)
        self._use_model(model)
        self._engine: Any = self._initialize() if self._trains or self._stage == 3 else None
        if self._engine is not None:
            self._called_model, self._optimizer = self._engine, self._engine.optimizer
        if self._trains:
            self._check_weights("after loading")
        set_timeouts(spec)

    def _initialize(self) -> Any:
        import deepspeed

        optimizer = self._build_optimizer(self._trained_weights()) if self._trains else None
        return deepspeed.initialize(model=self._model, optimizer=optimizer, config=self._config)[0]

    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        """Leave the gradients in DeepSpeed's buffers."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages the ranks' gradients, but this loss is a sum over the ranks.
        self._engine.backward(total * self._spec.world_size)

    def _clip_and_step(self) -> float:
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

    def _trained_state(self) -> TrainedState:
        return TrainedState(self._spec, self._trained_weights(), self._optimizer, self._stage)

    @staticmethod
    def _local_values(weight: Any) -> "Tensor":
        """Return the values of a weight that this rank has: all of them, or its shard under ZeRO 3, without padding."""
        if not hasattr(weight, "ds_tensor"):
            full: Tensor = weight
            return full
        shard: Tensor = weight.ds_tensor.view(-1)
        # The padding after the last value of the last shard is uninitialized memory.
        return shard[: max(0, weight.ds_numel - shard.numel() * weight.ds_zero_partition_rank)]

    def _drop_gathered(self) -> None:
        if self._stage == 3:
            self._engine.empty_partition_cache()

    def _weight_tensors(self) -> "Iterator[Tensor]":
        return weight_tensors(self._model)

    def _state_tensors(self) -> "Iterator[Tensor]":
        return optimizer_tensors(self._optimizer)

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
    routing_replay=True,
    trains_vision=True,
    training_memory={"float32": replace(TRAINING_MEMORY, weights=4, logits=8), "bfloat16": TRAINING_MEMORY},
    sends_weights_by=ALL_TRANSPORTS,
)
