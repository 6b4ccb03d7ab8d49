"""Trains, scores and values with plain PyTorch: one process, or one of those that share each sequence."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Rewards, Sequences, ValueEstimates
from rlflow.engines.base import ALL_TRANSPORTS, FP32_TRAINING, EngineSpec, TokenLoss, WeightTransport
from rlflow.engines.causal_lm.adapters import (
    add_adapters,
    copied_name,
    is_adapter,
    merged,
    trained,
    without_adapters,
    write_adapters,
)
from rlflow.engines.causal_lm.kernels import attention_of, set_determinism
from rlflow.engines.causal_lm.micro_batches import in_order, micro_batches
from rlflow.engines.causal_lm.output_heads import head_of, last_of_each, name_padding, outputs_of
from rlflow.engines.causal_lm.pretrained import check_finite, load_model, load_tokenizer, save_model
from rlflow.engines.causal_lm.totals import Totals, averaged_over_weights
from rlflow.engines.memory import TunableEngine, enable_expandable_segments
from rlflow.engines.sharded.process_group import meet, set_timeouts, spread_of, wait_for_files
from rlflow.errors import EngineError
from rlflow.resources.memory.state import TrainingMemory

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "state.pt"


class TorchEngine(TunableEngine):
    """What is trained is in float32, with its moments; a bfloat16 model computes under autocast. What is not, in a role
    that only scores or under adapters, stays in the model's type.

    Sequence-parallel ranks have the same rows and each all of the state. Each computes on a part of the tokens, and
    their gradients are added up.
    """

    parallel: ClassVar[frozenset[str]] = frozenset({"sequence"})
    package: ClassVar[str | None] = None
    concurrent: ClassVar[bool] = False
    training_memory: ClassVar[TrainingMemory | None] = FP32_TRAINING
    sends_weights_by: ClassVar[frozenset[WeightTransport]] = ALL_TRANSPORTS
    receives_weights_by: ClassVar[frozenset[WeightTransport]] = frozenset()

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        self._spec = spec
        self._head = head_of(spec)
        self._alone = spec.world_size == 1
        trains = "Trains" in spec.capabilities
        if trains:
            enable_expandable_segments(spec.device)
        set_determinism(spec)
        if not self._alone:
            meet(spec)
        self._model = load_model(
            spec.model_name,
            spec.model,
            device=spec.device,
            dtype=torch.float32 if trains and not spec.lora else getattr(torch, spec.model.dtype),
            seed=spec.seed,
            attention=attention_of(spec),
            head=self._head,
            trains=trains,
        )
        add_adapters(self._model, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        if spec.layout.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
        self._spread = spread_of(spec, self._model)
        if not self._alone:
            set_timeouts(spec)
        options = spec.optimizer
        self._optimizer = torch.optim.AdamW(
            (weight for weight in self._model.parameters() if weight.requires_grad),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )
        if trains:
            self._check_weights("as they were loaded are")

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._forward(sequences, temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with without_adapters(self._model):
            return self.logprobs(sequences, temperature)

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._forward(sequences, 1.0))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=last_of_each(self._forward(sequences, 1.0)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        import torch

        learning_rate = self._spec.optimizer.learning_rate_at(minibatch.step, self._spec.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._model.train()
        with self.within_memory():
            measured = self._gradients(minibatch, loss)
        self._model.eval()
        self._add_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._spec.optimizer.max_grad_norm)
        if not torch.isfinite(norm):
            loss_said = f"of {len(minibatch)} samples, whose loss is {measured['loss']:g}"
            raise EngineError(f"role {self._spec.role}: grad_norm is {float(norm)} in a minibatch {loss_said}.")
        self._optimizer.step()
        self._check_weights(f"after an update with learning rate {learning_rate:g} are")
        return Metrics(values={**measured, "grad_norm": float(norm), "learning_rate": learning_rate})

    def _gradients(self, minibatch: Minibatch, loss: TokenLoss) -> Mapping[str, float]:
        """Of all micro-batches, left with the weights; what is measured."""
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        totals = Totals(loss, self._model.device, self._spec.role)
        for rows in micro_batches(minibatch, self._spec.layout.micro_batch_tokens):
            part = minibatch.take(rows)
            with self._autocast():
                outputs, more = self._outputs(part, loss.temperature)
            torch.autograd.backward(totals.add(part, outputs, more))
        totals.check(totals.sums["loss"])
        return averaged_over_weights(totals.sums)

    def release_memory(self) -> None:
        """Release what torch caches, and the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        super().release_memory()

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        for name, weight in self._trained().items():
            yield copied_name(name), weight

    def save(self, folder: Path) -> None:
        """Rank 0 writes."""
        import torch

        if self._spec.rank == 0:
            state = {"model": self._trained(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, folder / _STATE)
        self._wait()

    def restore(self, folder: Path) -> None:
        import torch

        state = torch.load(folder / _STATE, map_location=self._model.device, weights_only=True)
        self._model.load_state_dict(state["model"], strict=self._spec.lora is None)
        self._optimizer.load_state_dict(state["optimizer"])
        self._check_weights("of the checkpoint are")

    def export(self, folder: Path) -> None:
        """Rank 0 writes."""
        import torch

        if self._spec.rank == 0:
            dtype = getattr(torch, self._spec.model.dtype)
            weights, lora = self._model.state_dict(), self._spec.lora
            whole = (merged(name, tensor, weights, lora) for name, tensor in weights.items() if not is_adapter(name))
            self._model.config.dtype = dtype
            if self._head == "reward":
                name_padding(self._model, self._tokenizer)
            # One after another, where adapters are added to them: two copies need not fit on a GPU.
            state = {name: tensor.to("cpu", dtype) for name, tensor in whole}
            check_finite(self._spec.role, state.items(), f"to be exported in {self._spec.model.dtype} are")
            save_model(self._model, self._tokenizer, folder, state)
            if lora is not None:
                write_adapters(folder / "adapters", lora, dict(self.weights()), self._spec.model.path)
        self._wait()

    def _check_weights(self, when: str) -> None:
        """Raise EngineError where a trained weight is not finite, so that it is never copied, saved or exported."""
        named = self._model.named_parameters()
        check_finite(self._spec.role, ((name, weight) for name, weight in named if weight.requires_grad), when)

    def _trained(self) -> "dict[str, Tensor]":
        return trained(self._model.state_dict(), self._spec.lora)

    def _add_gradients(self) -> None:
        """Each rank has those of its tokens."""
        import torch

        if not self._alone:
            for weight in self._model.parameters():
                if weight.grad is not None:
                    torch.distributed.all_reduce(weight.grad)

    def _wait(self) -> None:
        """For the other ranks."""
        if not self._alone:
            wait_for_files()

    def _forward(self, sequences: Sequences, temperature: float) -> Packed:
        import torch

        pieces = micro_batches(sequences, self._spec.layout.micro_batch_tokens)
        with self.within_memory(), torch.inference_mode(), self._autocast():
            values = [self._outputs(sequences.take(rows), temperature)[0].cpu().numpy() for rows in pieces]
        return in_order(sequences.response_ids, pieces, values)

    def _outputs(self, sequences: Sequences, temperature: float) -> "tuple[Tensor, dict[str, Tensor]]":
        """What the loss is a function of, and columns besides those of the minibatch."""
        return outputs_of(self._model, self._head, sequences, temperature, self._spread)

    def _autocast(self) -> "AbstractContextManager[object]":
        import torch

        mixed = self._spec.model.dtype == "bfloat16"
        return torch.autocast(self._model.device.type, torch.bfloat16, enabled=mixed)


ENGINE = TorchEngine
