"""The torch engine: trains, scores and values in plain PyTorch, in one process or in several that share sequences."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Rewards, Sequences, ValueEstimates
from rlflow.engines.base import ALL_TRANSPORTS, FP32_TRAINING, EngineKind, EngineSpec, TokenLoss, choose_head
from rlflow.engines.causal_lm.adapters import (
    add_adapters,
    is_adapter,
    merge_adapter,
    save_adapters,
    trained_weights,
    transfer_name,
    without_adapters,
)
from rlflow.engines.causal_lm.kernels import apply_determinism, choose_attention
from rlflow.engines.causal_lm.micro_batches import build_micro_batches, restore_order
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, save_model
from rlflow.engines.causal_lm.token_outputs import compute_outputs, last_values, set_pad_token
from rlflow.engines.causal_lm.totals import LossTotals, check_finite, weighted_means
from rlflow.engines.memory import TunableEngine, enable_expandable_segments
from rlflow.engines.sharded.process_group import create_sharding, join_process_group, set_timeouts, wait_for_files
from rlflow.engines.state_files import restore_state, save_state
from rlflow.engines.times import ProfiledEngine
from rlflow.errors import NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


class TorchEngine(TunableEngine, ProfiledEngine):
    """The engine for models that one GPU holds.

    Trained weights and their moments are float32, and a bfloat16 model computes under autocast. Weights that are not
    trained, in a role that only scores or below adapters, keep the model's dtype.

    Sequence-parallel ranks have the same rows and the same state. Each computes on a part of the tokens, and their
    gradients are summed.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        self._spec = spec
        self._head = choose_head(spec.capabilities)
        self._is_alone = spec.world_size == 1
        trains = "Trains" in spec.capabilities
        if trains:
            enable_expandable_segments(spec.device)
        apply_determinism(spec)
        if not self._is_alone:
            join_process_group(spec)
        self._model = load_model(
            spec.model_name,
            spec.model,
            device=spec.device,
            dtype=torch.float32 if trains and not spec.lora else getattr(torch, spec.model.dtype),
            seed=spec.seed,
            attention=choose_attention(spec),
            head=self._head,
            trains=trains,
        )
        add_adapters(self._model, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        if spec.layout.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
        self._sharding = create_sharding(spec, self._model)
        if not self._is_alone:
            set_timeouts(spec)
        options = spec.optimizer
        self._optimizer = torch.optim.AdamW(
            self._trained_parameters().values(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )
        if trains:
            self._check_weights("after loading")

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._forward(sequences, temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with without_adapters(self._model):
            return self.logprobs(sequences, temperature)

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._forward(sequences, 1.0))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=last_values(self._forward(sequences, 1.0)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """Take one optimizer step; every rank is called with the same minibatch."""
        import torch

        learning_rate = self._spec.optimizer.learning_rate_at(minibatch.step, self._spec.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._model.train()
        try:
            with self.within_memory():
                means = self._compute_gradients(minibatch, loss)
        finally:  # the run skips a step whose loss is not finite, and continues
            self._model.eval()
        self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._spec.optimizer.max_grad_norm)
        if not torch.isfinite(norm):
            where = f"a minibatch of {len(minibatch)} samples, whose loss is {means['loss']:g}"
            raise NotFiniteError(f"role {self._spec.role}: grad_norm is {float(norm)} in {where}.")
        self._optimizer.step()
        self._check_weights(f"after an update with learning rate {learning_rate:g}")
        return Metrics(values={**means, "grad_norm": float(norm), "learning_rate": learning_rate})

    def _compute_gradients(self, minibatch: Minibatch, loss: TokenLoss) -> Mapping[str, float]:
        """Add up the gradients of all micro-batches in the weights; return the loss and the means of the metrics."""
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        totals = LossTotals(loss, self._model.device, self._spec.role)
        for rows in build_micro_batches(minibatch, self._spec.layout.micro_batch_tokens):
            part = minibatch.take(rows)
            with self._autocast():
                outputs, more_columns = self._compute_outputs(part, loss.temperature)
            torch.autograd.backward(totals.add(part, outputs, more_columns))
        totals.check(totals.sums["loss"])
        return weighted_means(totals.sums)

    def _sum_gradients(self) -> None:
        """Sum the gradients of all ranks, each of which has those of its tokens."""
        import torch

        if not self._is_alone:
            for weight in self._model.parameters():
                if weight.grad is not None:
                    torch.distributed.all_reduce(weight.grad)

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        super().release_memory()

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        for name, weight in trained_weights(self._model.state_dict(), self._spec.lora).items():
            yield transfer_name(name), weight

    def save(self, folder: Path) -> None:
        """Write the trained weights and the optimizer's state, on rank 0."""
        if self._spec.rank == 0:
            save_state(folder, self._trained_parameters(), self._optimizer)
        self._wait()

    def restore(self, folder: Path) -> None:
        restore_state(self._spec.role, folder, self._trained_parameters(), self._optimizer)
        self._check_weights("in the checkpoint")

    def export(self, folder: Path) -> None:
        """Write the model, with adapters merged into it, and the adapters alone; on rank 0."""
        import torch

        if self._spec.rank == 0:
            dtype = getattr(torch, self._spec.model.dtype)
            weights, lora = self._model.state_dict(), self._spec.lora
            merged = (
                merge_adapter(name, tensor, weights, lora) for name, tensor in weights.items() if not is_adapter(name)
            )
            self._model.config.dtype = dtype
            if self._head == "reward":
                set_pad_token(self._model, self._tokenizer)
            # One weight after another: a GPU need not hold a second, merged copy of the model.
            state = {name: tensor.to("cpu", dtype) for name, tensor in merged}
            check_finite(self._spec.role, state.items(), f"when exported in {self._spec.model.dtype}")
            save_model(self._model, self._tokenizer, folder, state)
            if lora is not None:
                save_adapters(folder / "adapters", lora, dict(self.weights()), self._spec.model.path)
        self._wait()

    def _forward(self, sequences: Sequences, temperature: float) -> Packed:
        """Return the head's output for each response token, in the order of the batch."""
        import torch

        pieces = build_micro_batches(sequences, self._spec.layout.micro_batch_tokens)
        with self.within_memory(), torch.inference_mode(), self._autocast():
            values = [self._compute_outputs(sequences.take(rows), temperature)[0].cpu().numpy() for rows in pieces]
        return restore_order(sequences.response_ids, pieces, values)

    def _compute_outputs(self, sequences: Sequences, temperature: float) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return what the loss is a function of, and columns in addition to the minibatch's."""
        return compute_outputs(self._model, self._head, sequences, temperature, self._sharding)

    def _autocast(self) -> "AbstractContextManager[object]":
        import torch

        is_mixed = self._spec.model.dtype == "bfloat16"
        return torch.autocast(self._model.device.type, torch.bfloat16, enabled=is_mixed)

    def _trained_parameters(self) -> "dict[str, Parameter]":
        """Return the weights that the optimizer changes, in its order; tied ones once."""
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def _check_weights(self, when: str) -> None:
        """Raise EngineError if a trained weight is not finite, so that it is never copied, saved or exported."""
        check_finite(self._spec.role, self._trained_parameters().items(), when)

    def _wait(self) -> None:
        """Wait for the other ranks."""
        if not self._is_alone:
            wait_for_files()


ENGINE = EngineKind(
    engine=TorchEngine,
    parallel=frozenset({"sequence"}),
    training_memory=FP32_TRAINING,
    sends_weights_by=ALL_TRANSPORTS,
)
