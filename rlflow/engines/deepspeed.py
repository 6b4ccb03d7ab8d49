"""The DeepSpeed engine: trains, scores and values in one of the processes that share a model."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Rewards, Sequences, ValueEstimates
from rlflow.engines.base import ALL_TRANSPORTS, EngineKind, EngineSpec, TokenLoss, choose_head
from rlflow.engines.causal_lm.adapters import (
    add_adapters,
    is_adapter,
    merge_adapter,
    save_adapters,
    trained_weights,
    transfer_name,
    without_adapters,
)
from rlflow.engines.causal_lm.kernels import apply_determinism
from rlflow.engines.causal_lm.micro_batches import build_equal_micro_batches, restore_order
from rlflow.engines.causal_lm.pretrained import load_tokenizer, save_model
from rlflow.engines.causal_lm.token_outputs import compute_outputs, last_values, set_pad_token
from rlflow.engines.causal_lm.totals import LossTotals, check_finite, weighted_means
from rlflow.engines.memory import TunableEngine, enable_expandable_segments
from rlflow.engines.sharded.checkpoints import restore_shards, save_shards
from rlflow.engines.sharded.cpu_offload import OffloadedMemory, optimizer_tensors, weight_tensors
from rlflow.engines.sharded.loading import load_sharded
from rlflow.engines.sharded.process_group import create_sharding, set_timeouts, wait_for_files
from rlflow.engines.sharded.settings import TRAINING_MEMORY, deepspeed_config, init_deepspeed
from rlflow.engines.sharded.trained_state import TrainedState
from rlflow.engines.times import ProfiledEngine
from rlflow.errors import NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

# The bytes of weights that are gathered at a time.
_GATHERED_BYTES = 256 * 2**20


class DeepSpeedEngine(TunableEngine, ProfiledEngine):
    """The engine for models whose state is sharded over several GPUs.

    Every method is called on all ranks at the same time, each with its share of the rows. ZeRO shards the optimizer's
    state (1), also the gradients (2), and also the weights (3). bfloat16 weights have float32 masters. A role that is
    not trained has no optimizer, and only ZeRO 3 shards it. Sequence-parallel ranks are neighbours with the same rows,
    and each computes on a part of their tokens.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._head = choose_head(spec.capabilities)
        self._trains = "Trains" in spec.capabilities
        if self._trains:
            enable_expandable_segments(spec.device)
        apply_determinism(spec)
        init_deepspeed(spec)
        import torch

        self._spec = spec
        self._device = torch.device(spec.device)
        self._stage = spec.layout.zero_stage or 0
        self._config = deepspeed_config(spec, trains=self._trains)
        self._module = load_sharded(spec, self._config, head=self._head)
        # Ranks read at different speeds, and DeepSpeed's first collective has torch's default time-out.
        wait_for_files()
        add_adapters(self._module, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        if spec.layout.gradient_checkpointing:
            self._module.gradient_checkpointing_enable()
        self._sharding = create_sharding(spec, self._module)
        self._engine: Any = self._initialize() if self._trains or self._stage == 3 else None
        self._model: Any = self._module if self._engine is None else self._engine
        self._offloaded_weights, self._offloaded_state = OffloadedMemory(self._device), OffloadedMemory(self._device)
        if self._trains:
            self._check_weights("after loading")
        set_timeouts(spec)

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._forward(sequences, temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with without_adapters(self._module):
            return self.logprobs(sequences, temperature)

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._forward(sequences, 1.0))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=last_values(self._forward(sequences, 1.0)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """Take one optimizer step with this rank's share of the minibatch; metrics are those of the whole minibatch.

        The tokens' weights sum to one over all ranks.
        """
        learning_rate = self._spec.optimizer.learning_rate_at(minibatch.step, self._spec.steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._module.train()
        with self.within_memory():
            totals = self._compute_gradients(minibatch, loss)
        self._module.eval()
        means = weighted_means(self._sum_over_ranks(totals.sums))
        # Without a finite loss no gradient is, and DeepSpeed drops them only in its step.
        norm = self._step()
        totals.check(means["loss"], self._gather_problems)
        if not isfinite(norm):
            raise NotFiniteError(f"role {self._spec.role}: grad_norm is not finite, although the loss is.")
        self._check_weights(f"after an update with learning rate {learning_rate:g}")
        return Metrics(values={**means, "grad_norm": norm, "learning_rate": learning_rate})

    def _compute_gradients(self, minibatch: Minibatch, loss: TokenLoss) -> LossTotals:
        """Leave the gradients in DeepSpeed's buffers; return the sums over this rank's share."""
        totals = LossTotals(loss, self._device, self._spec.role)
        pieces, num_real = build_equal_micro_batches(minibatch, self._spec.layout.micro_batch_tokens)
        for number, rows in enumerate(pieces):
            self._engine.set_gradient_accumulation_boundary(number == len(pieces) - 1)
            part = minibatch.take(rows)
            outputs, more_columns = self._compute_outputs(part, loss.temperature)
            total = totals.add(part, outputs, more_columns, share=float(number < num_real))
            # DeepSpeed averages the ranks' gradients, but this loss is a sum over the ranks.
            self._engine.backward(total * self._spec.world_size)
        return totals

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        for name, weight in self._gather(trained_weights(self._named_weights(), self._spec.lora)):
            yield transfer_name(name), weight

    def save(self, folder: Path) -> None:
        save_shards(self._spec, folder, self._trained_state())

    def restore(self, folder: Path) -> None:
        """Load a checkpoint of any number of ranks and any ZeRO stage.

        Raises EngineError for files that are damaged, missing, or of another model.
        """
        restore_shards(self._spec, folder, self._trained_state())
        self._check_weights("in the checkpoint")

    def export(self, folder: Path) -> None:
        """Write the model, with adapters merged into it, and the adapters alone; on rank 0.

        Rank 0 collects the weights in host memory, never on its GPU.
        """
        import torch

        dtype = getattr(torch, self._spec.model.dtype)
        exported: dict[str, Tensor] = {}
        exported_by_id: dict[int, Tensor] = {}
        named, lora = self._named_weights(), self._spec.lora
        adapter_weights = {name: weight for name, weight in named.items() if is_adapter(name)}
        adapters = {name: weight.to("cpu", copy=True) for name, weight in self._gather(adapter_weights)}
        for name, weight in self._gather({n: weight for n, weight in named.items() if n not in adapter_weights}):
            if self._spec.rank == 0:
                base_name, value = merge_adapter(name, weight, adapters, lora)
                # Tied weights stay one tensor, by which transformers recognizes them.
                exported[base_name] = exported_by_id.setdefault(id(named[name]), value.to("cpu", dtype, copy=True))
        if self._spec.rank == 0:
            self._module.config.dtype = dtype
            if self._head == "reward":
                set_pad_token(self._module, self._tokenizer)
            check_finite(self._spec.role, exported.items(), f"when exported in {self._spec.model.dtype}")
            save_model(self._module, self._tokenizer, folder, exported)
            if lora is not None:
                named_for_peft = {transfer_name(name): weight for name, weight in adapters.items()}
                save_adapters(folder / "adapters", lora, named_for_peft, self._spec.model.path)
        wait_for_files()

    def release_memory(self) -> None:
        """Release the memory that torch caches, and the weights that ZeRO 3 has left gathered."""
        if self._stage == 3:
            self._engine.empty_partition_cache()
        super().release_memory()

    def sleep(self, discard_weights: bool = False) -> None:
        """Move weights and optimizer state to the host; on a CPU there is no memory to release."""
        assert not discard_weights, "no weight sync replaces the weights of this engine"
        if self._device.type == "cuda":
            self.release_memory()
            self._offload()

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
            self._offloaded_weights.offload(weight_tensors(self._module))
        if not self._offloaded_state.num_bytes:
            self._offloaded_state.offload(optimizer_tensors(getattr(self._engine, "optimizer", None)))

    def _initialize(self) -> Any:
        import deepspeed

        trainable = (weight for weight in self._module.parameters() if weight.requires_grad)
        optimizer = self._build_optimizer(trainable) if self._trains else None
        return deepspeed.initialize(model=self._module, optimizer=optimizer, config=self._config)[0]

    def _build_optimizer(self, parameters: "Iterable[Parameter]") -> "Optimizer":
        import torch

        options = self._spec.optimizer
        return torch.optim.AdamW(
            parameters, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )

    def _step(self) -> float:
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
        norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), limit))
        if isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def _forward(self, sequences: Sequences, temperature: float) -> Packed:
        import torch

        pieces, num_real = build_equal_micro_batches(sequences, self._spec.layout.micro_batch_tokens)
        with self.within_memory(), torch.no_grad():
            values = [self._compute_outputs(sequences.take(rows), temperature)[0].cpu().numpy() for rows in pieces]
        return restore_order(sequences.response_ids, pieces[:num_real], values[:num_real])

    def _compute_outputs(self, sequences: Sequences, temperature: float) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return what the loss is a function of, and columns in addition to the minibatch's."""
        return compute_outputs(self._model, self._head, sequences, temperature, self._sharding)

    def _gather_problems(self, own: str | None) -> list[str | None]:
        """Return the problem that each rank found."""
        import torch

        problems: list[str | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(problems, own)
        return problems

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sum over all shares of the data, each of which sequence-parallel ranks count several times."""
        import torch

        totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(totals)
        totals /= self._spec.layout.sequence_parallel_size
        return dict(zip(sums, totals.tolist(), strict=True))

    def _check_weights(self, when: str) -> None:
        """Raise EngineError if a trained weight is not finite, so that it is never copied, saved or exported.

        Each rank checks its own shard, so no rank waits for another.
        """
        shards = ((name, _own_shard(weight)) for name, weight in self._trained_weights().items())
        check_finite(self._spec.role, shards, when)

    def _trained_state(self) -> TrainedState:
        return TrainedState(self._spec, self._trained_weights(), self._engine.optimizer)

    def _trained_weights(self) -> "dict[str, Parameter]":
        """Return the weights that are trained, tied ones once."""
        return {name: weight for name, weight in self._module.named_parameters() if weight.requires_grad}

    def _named_weights(self) -> "dict[str, Tensor]":
        """Return all weights, or under ZeRO 3 this rank's shards of them."""
        return dict(self._module.state_dict(keep_vars=True))

    def _gather(self, weights: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        """Yield the full values, gathered group by group: a tensor is valid until the next one is requested."""
        for group in _gather_groups(weights.items()):
            with self._gathered([weight for _, weight in group]):
                for name, weight in group:
                    yield name, weight.detach()

    def _gathered(self, weights: "list[Tensor]") -> Any:
        """Return a context in which every rank has the full values of these weights."""
        import deepspeed

        sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
        return deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded))


def _own_shard(weight: Any) -> "Tensor":
    """Return the values of a weight that this rank has: all of them, or its shard under ZeRO 3, without padding."""
    if not hasattr(weight, "ds_tensor"):
        full: Tensor = weight
        return full
    shard: Tensor = weight.ds_tensor.view(-1)
    # The padding after the last value of the last shard is uninitialized memory.
    return shard[: max(0, weight.ds_numel - shard.numel() * weight.ds_zero_partition_rank)]


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
    training_memory=TRAINING_MEMORY,
    sends_weights_by=ALL_TRANSPORTS,
)
