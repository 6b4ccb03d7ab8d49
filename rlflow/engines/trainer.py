"""A base class for engines that train a model of transformers: passes over packed sequences, updates, exports."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Rewards, Sequences, TopLogprobs, ValueEstimates
from rlflow.batch.segments import unfold
from rlflow.batch.top_logprobs import find_words, to_records
from rlflow.engines.base import EngineSpec, TokenLoss, choose_head
from rlflow.engines.causal_lm.adapters import (
    Merger,
    is_adapter,
    learning_rate_factor,
    save_adapters,
    synced_weights,
    transfer_name,
    without_adapters,
)
from rlflow.engines.causal_lm.kernels import apply_determinism
from rlflow.engines.causal_lm.micro_batches import Index, PatchLimit, build_micro_batches, restore_order
from rlflow.engines.causal_lm.pretrained import load_tokenizer, save_model
from rlflow.engines.causal_lm.token_outputs import (
    NO_EXTRAS,
    Extras,
    last_values,
    set_pad_token,
    token_rewards,
    token_scores,
    token_values,
)
from rlflow.engines.causal_lm.totals import LossTotals, check_finite
from rlflow.engines.memory import TunableEngine, enable_expandable_segments
from rlflow.engines.sharded.checkpoints import restore_shards, save_shards
from rlflow.engines.sharded.process_group import create_sharding, wait_for_files
from rlflow.engines.sharded.trained_state import TrainedState
from rlflow.engines.times import ProfiledEngine
from rlflow.engines.vision.passes import create_vision, freeze_parts
from rlflow.errors import NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from transformers import PreTrainedModel


class TrainingEngine(TunableEngine, ProfiledEngine, ABC):
    """An engine that trains, scores and values, in one process or in several.

    Every method is called on all ranks of the role at the same time.
    """

    _called_model: Any
    """The model as a pass calls it, which the library may have wrapped."""
    _optimizer: Any = None
    """The optimizer, with torch's ``param_groups``; None for a role that is not trained."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepare the process. A subclass then loads the model and calls ``_use_model``."""
        self._spec = spec
        self._head = choose_head(spec.capabilities)
        self._trains = "Trains" in spec.capabilities
        if self._trains:
            enable_expandable_segments(spec.device)
        apply_determinism(spec)
        import torch

        self._device = torch.device(spec.device)

    def _use_model(self, model: "PreTrainedModel") -> None:
        """Take a loaded model, which has its adapters, and prepare it as the spec asks."""
        from rlflow.engines.causal_lm.compilation import checkpoint_layers, compile_layers, pays_to_compile
        from rlflow.engines.causal_lm.routing import Routers

        spec = self._spec
        self._model = self._called_model = model
        if self._trains:
            freeze_parts(model, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        self._vision = create_vision(spec, model.config, self._tokenizer)
        self._routers = Routers.of(model) if spec.routing_replay else None
        if spec.layout.gradient_checkpointing:
            checkpoint_layers(model, spec.layout.kept_layers)
        if pays_to_compile(spec, model):
            compile_layers(model)
        self._sharding = create_sharding(spec, model)

    def _build_optimizer(self, weights: "Mapping[str, Parameter]") -> "Optimizer":
        """Return the optimizer of these weights. A group has one learning rate and, as torch requires, one mesh."""
        import torch

        from rlflow.engines.causal_lm.muon import Muon, is_matrix

        options = self._spec.optimizer
        groups: dict[Any, dict[str, Any]] = {}
        for name, weight in weights.items():
            of_muon = options.kind == "muon" and is_matrix(name, weight)
            factor = learning_rate_factor(name, self._spec.lora)
            key = (getattr(weight, "device_mesh", None), of_muon, factor)
            groups.setdefault(key, {"params": [], "matrices": of_muon, "factor": factor})["params"].append(weight)
        if options.kind == "muon":
            return Muon(list(groups.values()), options)
        return torch.optim.AdamW(
            groups.values(), options.learning_rate, options.betas, weight_decay=options.weight_decay, fused=True
        )

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._forward(sequences, temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with without_adapters(self._model):
            return self.logprobs(sequences, temperature)

    def top_logprobs(self, sequences: Sequences, temperature: float, count: int) -> TopLogprobs:
        values = self._forward(sequences, temperature, Extras(top=count))
        return TopLogprobs(values=values.like(to_records(values.values)), is_scored=np.ones(len(values), np.bool_))

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._forward(sequences, 1.0))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=last_values(self._forward(sequences, 1.0)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """Take one optimizer step; metrics are those of the whole minibatch."""
        learning_rate = self._spec.optimizer.learning_rate_at(minibatch.step, self._spec.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("factor", 1.0)
        self._model.train()
        try:
            with self.within_memory():
                totals = self._compute_gradients(minibatch, loss)
        finally:  # the run skips a step whose loss is not finite, and continues
            self._model.eval()
        means, norm = self._step(totals)
        if not isfinite(norm):
            raise NotFiniteError(
                f"role {self._spec.role}: grad_norm is {norm}, although the loss is {means['loss']:g}."
            )
        self._check_weights(f"after an update with learning rate {learning_rate:g}")
        return Metrics(values={**means, "grad_norm": norm, "learning_rate": learning_rate})

    def _compute_gradients(self, minibatch: Minibatch, loss: TokenLoss) -> LossTotals:
        """Add up the gradients of all micro-batches; return the sums over this rank's share."""
        totals = LossTotals(loss, self._device, self._spec.role)
        minibatch = unfold(minibatch)
        pieces, num_real = self._cut(minibatch)
        for number, rows in enumerate(pieces):
            part = minibatch.take(rows)
            extras = Extras(loss.entropy, find_words(part.columns))
            outputs, more_columns = self._compute_outputs(part, loss.temperature, extras)
            total = totals.add(part, outputs, more_columns, share=float(number < num_real))
            self._backward(total, is_last=number == len(pieces) - 1)
        return totals

    @abstractmethod
    def _backward(self, total: "Tensor", *, is_last: bool) -> None:
        """Add the gradients of a pass."""

    @abstractmethod
    def _step(self, totals: LossTotals) -> tuple[dict[str, float], float]:
        """Clip the gradients and step; return the metrics of all ranks and the norm of the gradients before clipping.

        Raises NotFiniteError for a loss that is not finite. Where the norm is not finite, weights and optimizer stay as
        they are, on all ranks.
        """

    def _forward(self, sequences: Sequences, temperature: float, extras: Extras = NO_EXTRAS) -> Packed:
        """Return the head's output for each response token, in the order of the batch."""
        import torch

        response_ids, sequences = sequences.response_ids, unfold(sequences)
        pieces, num_real = self._cut(sequences)
        with self.within_memory(), torch.no_grad():
            outputs = [self._compute_outputs(sequences.take(rows), temperature, extras)[0] for rows in pieces]
            # One copy for all micro-batches: the GPU need not wait for the host between them.
            values = torch.cat(outputs).cpu().numpy()
        ends = np.cumsum([len(output) for output in outputs])[:-1]
        outputs_of_rows = np.split(values, ends)[:num_real]
        return restore_order(sequences.response_ids, pieces[:num_real], outputs_of_rows).regroup(response_ids.lengths)

    def _compute_outputs(
        self, sequences: Sequences, temperature: float, extras: Extras
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return what a loss is a function of, [T], float32, and columns in addition to the minibatch's.

        These are logprobs, and columns of entropies and of ``extras``; or the values before each token; or the rewards
        at each token. With ``extras.top`` the first is [T, 2 K].
        """
        model, sharding = self._called_model, self._sharding
        if self._head == "value":
            return token_values(model, sequences, sharding), {}
        if self._head == "reward":
            return token_rewards(model, sequences, sharding), {}
        scores = token_scores(model, sequences, temperature, extras, sharding, self._vision, self._routers)
        if extras.top:
            return scores, {}
        words = {} if extras.words is None else {"word_logprobs": scores[:, 2:]}
        return scores[:, 0], {"entropy": scores[:, 1], **words}

    def _cut(self, sequences: Sequences) -> tuple[list[Index], int]:
        """Return the micro-batches of this rank's rows, and how many of them are real; others count for nothing."""
        limit = self._limit_patches(sequences)
        pieces = build_micro_batches(sequences, self._spec.layout.micro_batch_tokens, patches=limit)
        return pieces, len(pieces)

    def _limit_patches(self, sequences: Sequences) -> PatchLimit | None:
        """Return the limit of a pass on images, for models that see some."""
        limit, vision = self._spec.layout.micro_batch_patches, self._vision
        return None if vision is None else vision.limit_patches(sequences, limit)

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        merger = self._create_merger()
        for name, weight in self._gather(synced_weights(self._model, self._named_weights(), self._spec)):
            yield transfer_name(name), merger.merge(name, weight)

    def _create_merger(self) -> Merger:
        """Return a merger with a copy of the adapters, or one that changes nothing where engines get no merged weights.

        All ranks call this at the same time.
        """
        lora, named = self._spec.lora, self._named_weights()
        sent = {name: weight for name, weight in named.items() if lora is not None and lora.merge and is_adapter(name)}
        return Merger(self._model, lora, {name: weight.clone() for name, weight in self._gather(sent)})

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

        Rank 0 collects the weights in host memory: a GPU need not hold a second, merged copy of the model.
        """
        import torch

        dtype = getattr(torch, self._spec.model.dtype)
        exported: dict[str, Tensor] = {}
        exported_by_id: dict[int, Tensor] = {}
        named, lora = self._named_weights(), self._spec.lora
        adapter_weights = {name: weight for name, weight in named.items() if is_adapter(name)}
        adapters = {name: weight.to("cpu", copy=True) for name, weight in self._gather(adapter_weights)}
        merger = Merger(self._model, lora, adapters)
        for name, weight in self._gather({n: weight for n, weight in named.items() if n not in adapter_weights}):
            if self._spec.rank == 0:
                value = merger.merge(name, weight).to("cpu", dtype, copy=True)
                # Tied weights stay one tensor, by which transformers recognizes them.
                exported[transfer_name(name)] = exported_by_id.setdefault(id(named[name]), value)
        if self._spec.rank == 0:
            self._model.config.dtype = dtype
            if self._head == "reward":
                set_pad_token(self._model, self._tokenizer)
            check_finite(self._spec.role, exported.items(), f"when exported in {self._spec.model.dtype}")
            family = None if self._vision is None else self._vision.family
            save_model(self._model, self._tokenizer, folder, exported, family)
            if lora is not None:
                named_for_peft = {transfer_name(name): weight for name, weight in adapters.items()}
                save_adapters(folder / "adapters", lora, named_for_peft, self._spec.model.path, self._model)
        if self._spec.world_size > 1:
            wait_for_files()

    def _check_weights(self, when: str) -> None:
        """Raise EngineError if a trained weight is not finite, so that it is never copied, saved or exported.

        Each rank checks its own shard, so no rank waits for another.
        """
        local = ((name, self._local_values(weight)) for name, weight in self._trained_weights().items())
        check_finite(self._spec.role, local, when)

    def _trained_state(self) -> TrainedState:
        return TrainedState(self._spec, self._trained_weights(), self._optimizer)

    def _trained_weights(self) -> "dict[str, Parameter]":
        """Return the weights that are trained, in the order of the optimizer; tied ones once."""
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def _named_weights(self) -> "dict[str, Tensor]":
        """Return all weights, or under ZeRO 3 this rank's shards of them."""
        return dict(self._model.state_dict(keep_vars=True))

    @staticmethod
    def _local_values(weight: Any) -> "Tensor":
        """Return the values of a weight that this rank has."""
        values: Tensor = weight
        return values

    def _gather(self, weights: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        """Yield the full values of weights; a tensor is valid until the next one is requested."""
        for name, weight in weights.items():
            yield name, weight.detach()
