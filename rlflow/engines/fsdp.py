"""The FSDP engine: trains, scores and values in one of the processes that share a model, sharded by torch itself."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import ALL_TRANSPORTS, TORCH_TRAINING, EngineKind, EngineSpec
from rlflow.engines.buckets import LARGEST_BYTES, part_name
from rlflow.engines.causal_lm.adapters import add_adapters, synced_weights, transfer_name
from rlflow.engines.causal_lm.expert_files import names_in_files, split_experts
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.token_outputs import NO_EXTRAS, Extras
from rlflow.engines.sharded.engine import ShardedEngine
from rlflow.engines.sharded.mesh import create_meshes
from rlflow.engines.sharded.process_group import join_process_group, set_timeouts, wait_for_files
from rlflow.engines.sharded.shard_values import count_copies, full_values, local_values, row_slices
from rlflow.engines.sharded.sharded_state import ShardedState
from rlflow.engines.sharded.shards import MeshShards
from rlflow.engines.sharded.trained_state import TrainedState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel


class FsdpEngine(ShardedEngine):
    """The engine whose state is sharded by torch, in one replica over all ranks or in several (HSDP).

    Weights and optimizer state are float32, and each pass gathers the weights in the model's dtype. Gradients are
    added up and reduced in float32. A role that is not trained is sharded, or whole on every rank.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        super().__init__(spec)
        join_process_group(spec)
        self._dtype = getattr(torch, spec.model.dtype)
        is_sharded = self._trains or spec.layout.zero_stage == 3
        model = self._load() if is_sharded else self._load_whole()
        # Ranks read at different speeds, and a collective has the time-out of a step.
        wait_for_files()
        self._use_model(model)
        self._root: FSDPModule | None = None
        """The model, where it is sharded."""
        if is_sharded:
            self._root, self._called_model = cast("FSDPModule", model), _InDtype(model, self._dtype)
        if self._trains:
            self._optimizer = self._build_optimizer(self._trained_weights())
            self._check_weights("after loading")
        set_timeouts(spec)

    def _load(self) -> "PreTrainedModel":
        import torch
        from torch.distributed.tensor import DTensor

        spec = self._spec
        # Frozen weights have no masters.
        dtype = torch.float32 if self._trains and not spec.lora else self._dtype
        self._meshes = create_meshes(spec)
        model = load_model(spec, dtype=dtype, shards=MeshShards(spec, self._meshes, self._dtype))
        for weight in model.parameters():
            if not isinstance(weight, DTensor):  # it encodes images, and stays frozen
                weight.data = weight.data.to(self._dtype)
        return model

    def _load_whole(self) -> "PreTrainedModel":
        model = load_model(self._spec, dtype=self._dtype)
        add_adapters(model, self._spec)
        return model

    def _forward(self, sequences: Sequences, temperature: float, extras: Extras = NO_EXTRAS) -> Packed:
        outputs = super()._forward(sequences, temperature, extras)
        self._drop_gathered()
        return outputs

    def _drop_gathered(self) -> None:
        if self._root is not None:
            # A pass leaves the weights outside of layers gathered for a backward pass.
            self._root.reshard()

    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        """Add the gradients of a pass: to those of all weights, or reduced to this rank's shards of them."""
        assert self._root is not None
        self._root.set_requires_gradient_sync(is_last or not self._spec.layout.reduces_once)
        # Replicas need each other's gradients only for the step.
        self._root.set_requires_all_reduce(is_last)
        total.backward()  # type: ignore[no-untyped-call]

    def _clip_and_step(self) -> float:
        import torch

        shards: dict[int, list[Tensor]] = {}
        for weight in self._trained_weights().values():
            if weight.grad is not None:
                shards.setdefault(count_copies(weight), []).append(local_values(weight.grad))
        norms = ((torch.nn.utils.get_total_norm(gradients), copies) for copies, gradients in shards.items())
        squares = (norm.double().square() / copies for norm, copies in norms)
        norm = self._sum_over_shards(sum(squares, start=torch.zeros((), device=self._device))).sqrt()
        if torch.isfinite(norm):
            for group in self._optimizer.param_groups:
                torch.nn.utils.clip_grads_with_norm_(group["params"], self._spec.optimizer.max_grad_norm, norm.float())
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _sum_over_shards(self, value: "Tensor") -> "Tensor":
        """Return the sum of a value over all ranks."""
        import torch

        torch.distributed.all_reduce(value)
        return value

    def _trained_state(self) -> TrainedState:
        return ShardedState(self._spec, self._trained_weights(), self._optimizer)

    @staticmethod
    def _local_values(weight: Any) -> "Tensor":
        return local_values(weight)

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield the weights that a sync transfers; of large ones the rows in parts, or experts by their names in files.

        No rank holds more than ``LARGEST_BYTES`` of them at a time.
        """
        merger = self._create_merger()
        for name, weight in synced_weights(self._model, self._named_weights(), self._spec).items():
            sent_name = transfer_name(name)
            if weight.numel() * self._dtype.itemsize <= LARGEST_BYTES:
                yield from ((sent_name, merger.merge(name, values)) for _, values in self._gather({name: weight}))
                continue
            names = names_in_files(self._model, sent_name, weight)
            for first, rows in row_slices(weight, self._dtype, LARGEST_BYTES):
                values = merger.merge(name, rows, first)
                if names:
                    yield from split_experts(names, first, values)
                else:
                    yield part_name(sent_name, is_last=first + len(rows) == len(weight)), values

    def _gather(self, weights: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        import torch

        for name, weight in weights.items():
            # Buffers are in the type that the model needs.
            is_buffer = not isinstance(weight, torch.nn.Parameter)
            yield name, full_values(weight, weight.dtype if is_buffer else self._dtype)

    def _weight_tensors(self) -> "Iterable[Tensor]":
        return [local_values(tensor.data) for tensor in (*self._model.parameters(), *self._model.buffers())]

    def _state_tensors(self) -> "Iterable[Tensor]":
        states = self._optimizer.state.values() if self._trains else ()
        return [local_values(value) for state in states for value in state.values()]


class _InDtype:
    """A model whose dtype is the one in which it computes, while its weights are in another."""

    def __init__(self, module: "PreTrainedModel", dtype: Any) -> None:
        self.module, self.dtype = module, dtype

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_TRAINING_MEMORY = replace(TORCH_TRAINING["bfloat16"], weights=4, optimizer=8, gathers_apart=True)

ENGINE = EngineKind(
    engine=FsdpEngine,
    routing_replay=True,
    optimizers=frozenset({"adamw", "muon"}),
    parallel=frozenset({"data", "sequence", "tensor", "expert", "replicate"}),
    training_memory={"float32": TORCH_TRAINING["float32"], "bfloat16": _TRAINING_MEMORY},
    sends_weights_by=ALL_TRANSPORTS,
)
