"""The torch engine: trains, scores and values in plain PyTorch, in one process or in several that share sequences."""

from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.batch import Minibatch
from rlflow.engines.base import ALL_TRANSPORTS, TORCH_TRAINING, EngineKind, EngineSpec, TokenLoss
from rlflow.engines.causal_lm.adapters import add_adapters
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.engines.sharded.process_group import join_process_group, set_timeouts
from rlflow.engines.trainer import TrainingEngine

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Parameter


class TorchEngine(TrainingEngine):
    """The engine for models that one GPU holds.

    The model computes in its dtype. What is trained in bfloat16 has float32 masters: gradients are added up in float32,
    the optimizer changes the masters, and the model gets their values rounded.

    Sequence-parallel ranks have the same rows and the same state. Each computes on a part of the tokens, and their
    gradients are summed.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        super().__init__(spec)
        if spec.world_size > 1:
            join_process_group(spec)
        dtype = getattr(torch, spec.model.dtype)
        in_fp32 = self._trains and not spec.lora
        model = load_model(spec, dtype=torch.float32 if in_fp32 else dtype)
        add_adapters(model, spec)
        self._use_model(model)
        if spec.world_size > 1:
            set_timeouts(spec)
        self._masters: dict[str, Parameter] = {}
        if self._trains:
            for weight in self._model.parameters():
                if in_fp32 and not weight.requires_grad:
                    weight.data = weight.data.to(dtype)
            self._masters = {name: _make_master(weight, dtype) for name, weight in super()._trained_weights().items()}
            self._optimizer = self._build_optimizer(self._masters)
            self._check_weights("after loading")

    def _compute_gradients(self, minibatch: Minibatch, loss: TokenLoss) -> LossTotals:
        self._optimizer.zero_grad(set_to_none=True)
        return super()._compute_gradients(minibatch, loss)

    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        total.backward()  # type: ignore[no-untyped-call]

    def _step(self, totals: LossTotals) -> tuple[dict[str, float], float]:
        import torch

        totals.check(totals.sums["loss"])
        masters = list(self._masters.values())
        if self._spec.world_size > 1:
            # Each rank has the gradients of its tokens.
            for master in masters:
                if master.grad is not None:
                    torch.distributed.all_reduce(master.grad)
        norm = torch.nn.utils.clip_grad_norm_(masters, self._spec.optimizer.max_grad_norm)
        if torch.isfinite(norm):
            self._optimizer.step()
            self._round_masters()
        return weighted_means(totals.sums), float(norm)

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        self._round_masters()

    def _trained_weights(self) -> "dict[str, Parameter]":
        return self._masters

    def _round_masters(self) -> None:
        """Give the model the values of its masters."""
        for weight, master in zip(super()._trained_weights().values(), self._masters.values(), strict=True):
            weight.data.copy_(master.data)

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the gradients of the last step."""
        if self._trains:
            self._optimizer.zero_grad(set_to_none=True)
        super().release_memory()


def _make_master(weight: "Parameter", dtype: "torch.dtype") -> "Parameter":
    """Give a weight that is trained the ``dtype``; return its master, to which each of its gradients is added.

    A float32 weight is its own master.
    """
    import torch

    if dtype == torch.float32:
        return weight
    master = torch.nn.Parameter(weight.detach().float())
    weight.data = weight.detach().to(dtype)

    def add_gradient(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    weight.register_post_accumulate_grad_hook(add_gradient)  # type: ignore[no-untyped-call]
    return master


ENGINE = EngineKind(
    engine=TorchEngine,
    parallel=frozenset({"sequence"}),
    routing_replay=True,
    optimizers=frozenset({"adamw", "muon"}),
    trains_vision=True,
    training_memory=TORCH_TRAINING,
    sends_weights_by=ALL_TRANSPORTS,
)
