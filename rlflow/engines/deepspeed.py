"""Trains, scores and values with DeepSpeed: one process of those that share a model."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Rewards, Sequences, ValueEstimates
from rlflow.engines.base import ALL_TRANSPORTS, EngineSpec, TokenLoss, WeightTransport
from rlflow.engines.causal_lm.adapters import (
    add_adapters,
    copied_name,
    is_adapter,
    merged,
    trained,
    without_adapters,
    write_adapters,
)
from rlflow.engines.causal_lm.kernels import set_determinism
from rlflow.engines.causal_lm.micro_batches import in_order
from rlflow.engines.causal_lm.output_heads import head_of, last_of_each, name_padding, outputs_of
from rlflow.engines.causal_lm.pretrained import check_finite, load_tokenizer, save_model
from rlflow.engines.causal_lm.totals import Totals, averaged_over_weights
from rlflow.engines.memory import TunableEngine, enable_expandable_segments
from rlflow.engines.sharded.cpu_offload import Parked, state_of, weights_of
from rlflow.engines.sharded.loading import UNIVERSAL, clear, load_sharded, needs_resharding, reads_universal, resharded
from rlflow.engines.sharded.process_group import rounds, set_timeouts, spread_of, wait_for_files, while_files_move
from rlflow.engines.sharded.settings import TRAINING_MEMORY, deepspeed_config, join
from rlflow.errors import EngineError, first_line
from rlflow.resources.memory.state import TrainingMemory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

# Bytes of weights that are gathered at once.
_GATHERED = 256 * 2**20
_TAG = "deepspeed"
_MADE_BY = "deepspeed.json"


class DeepSpeedEngine(TunableEngine):
    """Every method is called on all ranks together, each with its share of the rows.

    ZeRO shards the state over all ranks: the optimizer's (1), gradients too (2), weights too (3). bfloat16 weights have
    float32 masters. A role that is not trained has no optimizer, and is sharded by ZeRO 3 alone. Neighbouring ranks
    that are sequence-parallel have the same rows, and each computes on a part of their tokens.
    """

    parallel: ClassVar[frozenset[str]] = frozenset({"data", "sequence"})
    package: ClassVar[str | None] = "deepspeed"
    concurrent: ClassVar[bool] = False
    training_memory: ClassVar[TrainingMemory | None] = TRAINING_MEMORY
    sends_weights_by: ClassVar[frozenset[WeightTransport]] = ALL_TRANSPORTS
    receives_weights_by: ClassVar[frozenset[WeightTransport]] = frozenset()

    def __init__(self, spec: EngineSpec) -> None:
        self._head = head_of(spec)
        self._trains = "Trains" in spec.capabilities
        if self._trains:
            enable_expandable_segments(spec.device)
        set_determinism(spec)
        join(spec)
        import torch

        self._spec = spec
        self._device = torch.device(spec.device)
        self._stage = spec.layout.zero_stage or 0
        self._config = deepspeed_config(spec, trains=self._trains)
        self._module = load_sharded(spec, self._config, head=self._head)
        # Ranks read at different speeds, and DeepSpeed's first exchange has torch's own time-out.
        wait_for_files()
        add_adapters(self._module, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        if spec.layout.gradient_checkpointing:
            self._module.gradient_checkpointing_enable()
        self._spread = spread_of(spec, self._module)
        self._engine: Any = self._start() if self._trains or self._stage == 3 else None
        self._model: Any = self._module if self._engine is None else self._engine
        self._weights_away, self._state_away = Parked(self._device), Parked(self._device)
        if self._trains:
            self._check_weights("as they were loaded are")
        set_timeouts(spec)

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._forward(sequences, temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with without_adapters(self._module):
            return self.logprobs(sequences, temperature)

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._forward(sequences, 1.0))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=last_of_each(self._forward(sequences, 1.0)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """The rank's share of the minibatch: weights add up to one over all ranks. Metrics are those of all of it."""
        learning_rate = self._spec.optimizer.learning_rate_at(minibatch.step, self._spec.steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._module.train()
        with self.within_memory():
            totals = self._gradients(minibatch, loss)
        self._module.eval()
        measured = averaged_over_weights(self._summed(totals.sums))
        totals.check(measured["loss"], self._said_by_all)
        norm = self._step()
        self._check_weights(f"after an update with learning rate {learning_rate:g} are")
        return Metrics(values={**measured, "grad_norm": norm, "learning_rate": learning_rate})

    def _gradients(self, minibatch: Minibatch, loss: TokenLoss) -> Totals:
        """Left at the weights. Returns sums over this rank's share."""
        totals = Totals(loss, self._device, self._spec.role)
        pieces, counting = rounds(minibatch, self._spec.layout.micro_batch_tokens)
        for at, rows in enumerate(pieces):
            self._engine.set_gradient_accumulation_boundary(at == len(pieces) - 1)
            part = minibatch.take(rows)
            outputs, more = self._outputs(part, loss.temperature)
            total = totals.add(part, outputs, more, share=float(at < counting))
            # DeepSpeed takes the mean of the ranks' gradients, and this loss is a sum over them.
            self._engine.backward(total * self._spec.world_size)
        return totals

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        for name, weight in self._whole(trained(self._named(), self._spec.lora)):
            yield copied_name(name), weight

    def save(self, folder: Path) -> None:
        frozen = self._spec.lora is not None
        with while_files_move(self._spec):
            self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=frozen)
        if self._spec.rank == 0:
            (folder / _MADE_BY).write_text(json.dumps(self._shards))

    def restore(self, folder: Path) -> None:
        """Of any number of ranks. Raises RecipeError for what a ZeRO stage saved that is sharded in another way,
        EngineError for lost files."""
        saved = json.loads((folder / _MADE_BY).read_text())
        if needs_resharding(self._spec, saved, self._shards):
            with resharded(self._spec, folder, _TAG, saved["world_size"]), reads_universal(self._engine):
                self._load(folder, UNIVERSAL)
        else:
            if self._spec.rank == 0:
                clear(folder)
            self._load(folder, _TAG)

    def _load(self, folder: Path, tag: str) -> None:
        try:
            with while_files_move(self._spec):
                strict = self._spec.lora is None
                found, _ = self._engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)
        except Exception as error:  # whatever DeepSpeed stumbles over where files are missing
            raise EngineError(
                f"role {self._spec.role}: '{folder}' cannot be restored ({first_line(error)})."
            ) from error
        if found is None:
            raise EngineError(f"role {self._spec.role}: DeepSpeed found nothing to restore in '{folder}'.")
        self._check_weights("of the checkpoint are")

    def export(self, folder: Path) -> None:
        """Rank 0 writes. It holds the weights in the memory of its host for that, never on its GPU."""
        import torch

        dtype = getattr(torch, self._spec.model.dtype)
        whole: dict[str, Tensor] = {}
        shared: dict[int, Tensor] = {}
        named, lora = self._named(), self._spec.lora
        small = {name: weight for name, weight in named.items() if is_adapter(name)}
        adapters = {name: weight.to("cpu", copy=True) for name, weight in self._whole(small)}
        for name, weight in self._whole({name: weight for name, weight in named.items() if name not in small}):
            if self._spec.rank == 0:
                plain, value = merged(name, weight, adapters, lora)
                # Weights that are tied are one tensor, which is how they are known to be tied.
                whole[plain] = shared.setdefault(id(named[name]), value.to("cpu", dtype, copy=True))
        if self._spec.rank == 0:
            self._module.config.dtype = dtype
            if self._head == "reward":
                name_padding(self._module, self._tokenizer)
            check_finite(self._spec.role, whole.items(), f"to be exported in {self._spec.model.dtype} are")
            save_model(self._module, self._tokenizer, folder, whole)
            if lora is not None:
                copied = {copied_name(name): weight for name, weight in adapters.items()}
                write_adapters(folder / "adapters", lora, copied, self._spec.model.path)
        wait_for_files()

    def release_memory(self) -> None:
        """Release what torch caches, and the weights that ZeRO 3 has left whole."""
        if self._stage == 3:
            self._engine.empty_partition_cache()
        super().release_memory()

    def sleep(self, discard_weights: bool = False) -> None:
        """On a GPU. Without one there is nothing to give up."""
        assert not discard_weights, "no copy replaces the weights of a role with this engine"
        if self._device.type == "cuda":
            self.release_memory()
            self._park()

    def wake(self, weights_only: bool = False) -> None:
        """With ``weights_only`` the optimizer's state is with the host afterwards, wherever it was."""
        if weights_only:
            # The state has views of the weights, which must not go with it.
            self.sleep()
        self._weights_away.bring_back()
        if not weights_only:
            self._state_away.bring_back()

    def _park(self) -> None:
        if not self._weights_away.held_bytes:
            self._weights_away.put_away(weights_of(self._module))
        if not self._state_away.held_bytes:
            self._state_away.put_away(state_of(getattr(self._engine, "optimizer", None)))

    def _start(self) -> Any:
        import deepspeed

        trained_ones = (weight for weight in self._module.parameters() if weight.requires_grad)
        optimizer = self._optimizer(trained_ones) if self._trains else None
        return deepspeed.initialize(model=self._module, optimizer=optimizer, config=self._config)[0]

    def _optimizer(self, parameters: "Iterable[Parameter]") -> "Optimizer":
        import torch

        options = self._spec.optimizer
        return torch.optim.AdamW(
            parameters, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )

    def _step(self) -> float:
        """Clips and steps; returns the norm before clipping. Raises EngineError when that is not finite."""
        import torch

        limit = self._spec.optimizer.max_grad_norm
        if self._config["gradient_clipping"]:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        else:
            norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), limit))
            self._engine.step()
        # DeepSpeed writes -1 for a norm that is not finite.
        if not 0 <= norm < float("inf"):
            raise EngineError(f"role {self._spec.role}: grad_norm is not finite ({norm}), although the loss is.")
        return norm

    def _forward(self, sequences: Sequences, temperature: float) -> Packed:
        import torch

        pieces, counting = rounds(sequences, self._spec.layout.micro_batch_tokens)
        with self.within_memory(), torch.no_grad():
            values = [self._outputs(sequences.take(rows), temperature)[0].cpu().numpy() for rows in pieces]
        return in_order(sequences.response_ids, pieces[:counting], values[:counting])

    def _outputs(self, sequences: Sequences, temperature: float) -> "tuple[Tensor, dict[str, Tensor]]":
        """What the loss is a function of, and columns besides those of the minibatch."""
        return outputs_of(self._model, self._head, sequences, temperature, self._spread)

    def _said_by_all(self, own: str | None) -> list[str | None]:
        """Return what each rank says."""
        import torch

        said: list[str | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(said, own)
        return said

    def _summed(self, sums: dict[str, float]) -> dict[str, float]:
        """Over all shares of the data."""
        import torch

        totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(totals)
        totals /= self._spec.layout.sequence_parallel_size
        return dict(zip(sums, totals.tolist(), strict=True))

    def _check_weights(self, when: str) -> None:
        """Raise EngineError where a trained weight is not finite, so that it is never copied, saved or exported.

        Each rank checks what it has, so no rank waits for another.
        """
        named = self._module.named_parameters()
        check_finite(self._spec.role, ((name, _own(weight)) for name, weight in named if weight.requires_grad), when)

    def _named(self) -> "dict[str, Tensor]":
        """All weights, or what this rank has of them."""
        return dict(self._module.state_dict(keep_vars=True))

    def _whole(self, weights: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        """Gathered in turn: a tensor is good until the next is asked for."""
        for group in _groups(weights.items()):
            with self._gathered([weight for _, weight in group]):
                for name, weight in group:
                    yield name, weight.detach()

    def _gathered(self, weights: "list[Tensor]") -> Any:
        """A context in which these are whole on every rank."""
        import deepspeed

        sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
        return deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded))

    @property
    def _shards(self) -> dict[str, int]:
        return {"world_size": self._spec.world_size, "zero_stage": self._stage}


def _own(weight: Any) -> "Tensor":
    """Return the values of a weight that this rank has: all of them, or its shard under ZeRO 3, without padding."""
    if not hasattr(weight, "ds_tensor"):
        own: Tensor = weight
        return own
    shard: Tensor = weight.ds_tensor.view(-1)
    # Behind the last value of the last shard is whatever was in memory.
    return shard[: max(0, weight.ds_numel - shard.numel() * weight.ds_zero_partition_rank)]


def _groups(weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[list[tuple[str, Tensor]]]":
    """In their order, about ``_GATHERED`` bytes at a time."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in weights:
        nbytes = int(getattr(weight, "ds_numel", weight.numel())) * weight.element_size()
        if group and size + nbytes > _GATHERED:
            yield group
            group, size = [], 0
        group.append((name, weight))
        size += nbytes
    yield group


ENGINE = DeepSpeedEngine
