"""The torch engine: trains, scores and values in plain PyTorch, in one process or in several that share sequences."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rlflow.batch import Minibatch
from rlflow.engines.base import ALL_TRANSPORTS, FP32_TRAINING, EngineKind, EngineSpec, TokenLoss
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.engines.sharded.process_group import join_process_group, set_timeouts
from rlflow.engines.trainer import TrainingEngine

if TYPE_CHECKING:
    from torch import Tensor


class TorchEngine(TrainingEngine):
    """The engine for models that one GPU holds.

    Trained weights and their moments are float32, and a bfloat16 model computes under autocast. Weights that are not
    trained, in a role that only scores or below adapters, keep the model's dtype.

    Sequence-parallel ranks have the same rows and the same state. Each computes on a part of the tokens, and their
    gradients are summed.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        super().__init__(spec)
        if spec.world_size > 1:
            join_process_group(spec)
        in_fp32 = self._trains and not spec.lora
        self._use_model(load_model(spec, dtype=torch.float32 if in_fp32 else getattr(torch, spec.model.dtype)))
        if spec.world_size > 1:
            set_timeouts(spec)
        self._optimizer = self._build_optimizer(self._trained_weights().values())
        if self._trains:
            self._check_weights("after loading")

    def _compute_gradients(self, minibatch: Minibatch, loss: TokenLoss) -> LossTotals:
        self._optimizer.zero_grad(set_to_none=True)
        return super()._compute_gradients(minibatch, loss)

    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        total.backward()  # type: ignore[no-untyped-call]

    def _step(self, totals: LossTotals) -> tuple[dict[str, float], float]:
        import torch

        totals.check(totals.sums["loss"])
        weights = list(self._model.parameters())
        if self._spec.world_size > 1:
            # Each rank has the gradients of its tokens.
            for weight in weights:
                if weight.grad is not None:
                    torch.distributed.all_reduce(weight.grad)
        norm = torch.nn.utils.clip_grad_norm_(weights, self._spec.optimizer.max_grad_norm)
        if torch.isfinite(norm):
            self._optimizer.step()
        return weighted_means(totals.sums), float(norm)

    def _autocast(self) -> "AbstractContextManager[object]":
        import torch

        is_mixed = self._spec.model.dtype == "bfloat16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_mixed)

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        super().release_memory()


ENGINE = EngineKind(
    engine=TorchEngine,
    parallel=frozenset({"sequence"}),
    training_memory=FP32_TRAINING,
    sends_weights_by=ALL_TRANSPORTS,
)
