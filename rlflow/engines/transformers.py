"""The transformers engine: generates and scores with a model of the transformers library, in this process."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Prompts, Repeated, Rollouts, Sequences, TopLogprobs
from rlflow.batch.routing import pack_routing
from rlflow.batch.top_logprobs import to_records
from rlflow.engines.base import TORCH_TRAINING, EngineKind, EngineSpec, Sampling, sample_seed
from rlflow.engines.causal_lm.adapters import add_adapters, sent_weights, transfer_name
from rlflow.engines.causal_lm.decoding import NewTokens, decode
from rlflow.engines.causal_lm.micro_batches import build_micro_batches, restore_order
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, merge_end_ids
from rlflow.engines.causal_lm.token_outputs import NO_EXTRAS, Extras, token_scores
from rlflow.engines.journal import Journal
from rlflow.engines.memory import TunableEngine
from rlflow.engines.serving.weights import ExpectedWeights
from rlflow.engines.times import ProfiledEngine
from rlflow.engines.vision.passes import create_vision
from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _DecodingBatch:
    """The sequences that are decoded at the same time: some samples of some neighbouring prompts."""

    first_prompt: int
    num_prompts: int
    first_sample: int
    num_samples: int


class TransformersEngine(TunableEngine, ProfiledEngine):
    """The engine for small models, on a CPU or on a GPU. It follows a trained role."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        from rlflow.engines.causal_lm.routing import Routers

        self._spec, self.seed = spec, spec.seed
        self._model = load_model(spec, dtype=getattr(torch, spec.model.dtype))
        add_adapters(self._model, spec)
        self.tokenizer = load_tokenizer(spec.model_name, spec.model)
        self._vision = create_vision(spec, self._model.config, self.tokenizer)
        self._routers = Routers.of(self._model) if spec.routing_replay else None
        self._end_ids = merge_end_ids(self._model.generation_config.eos_token_id, self.tokenizer.eos_token_id)
        self._version: int | None = 0
        self.journal = Journal(spec.journal, spec.role)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        if sampling.turns is not None:
            return sampling.turns.generate(self, prompts, sampling)
        self._check_version()
        samples = prompts.repeat(sampling.group_size)
        seeds = [sample_seed(self._spec.seed, key) for key in samples.keys]
        recorded, parts = self.journal.recorded(samples.keys), []
        for batch in self._decoding_batches(prompts.ids.lengths, sampling.group_size):
            first = batch.first_prompt * sampling.group_size + batch.first_sample
            end = first + batch.num_prompts * batch.num_samples
            members = samples.take(np.arange(first, end))
            recorded_rows, rollouts = recorded.find(members, sampling)
            if rollouts is not None and len(recorded_rows) == len(members):
                parts.append(rollouts)
                continue
            batch_prompts = prompts.take(np.arange(batch.first_prompt, batch.first_prompt + batch.num_prompts))
            batch_sampling = replace(sampling, group_size=batch.num_samples)
            new = decode(
                self._model,
                batch_prompts,
                batch_sampling,
                seeds[first:end],
                self._end_ids,
                self._vision,
                self._routers,
            )
            parts.append(self._build_rollouts(members, sampling, new))
            self.journal.add(parts[-1], members, sampling)
        return Rollouts.concatenate(parts)

    def _build_rollouts(self, samples: Prompts, sampling: Sampling, new: NewTokens) -> Rollouts:
        response_ids = Packed.from_rows(new.ids, np.int32)
        versions = Repeated(np.full(len(response_ids), self._version, np.int32), response_ids.lengths)
        responses = [response_ids[row] for row in range(len(samples))]
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            images=samples.images,
            response_ids=response_ids,
            logprobs=response_ids.like(np.concatenate(new.logprobs)),
            versions=versions,
            temperature=sampling.scoring_temperature,
            finished=new.finished,
            texts=tuple(self.tokenizer.batch_decode(responses, skip_special_tokens=True)),
            rows=samples.rows,
            routing=None if new.routing is None else pack_routing(new.routing),
        )

    def _check_version(self) -> None:
        if self._version is None:
            raise EngineError(
                f"role {self._spec.role}: the last weight sync failed, so its model mixes old and new weights."
            )

    def _decoding_batches(self, lengths: NDArray[np.int64], group_size: int) -> Iterator[_DecodingBatch]:
        """Yield batches within the planned number of sequences, and the planned number of prompt tokens per pass."""
        num_samples = min(group_size, self._spec.max_num_seqs)
        max_prompts = max(1, self._spec.max_num_seqs // group_size)
        first = 0
        while first < len(lengths):
            tokens = np.cumsum(lengths[first : first + max_prompts])
            count = max(1, int(np.searchsorted(tokens, self._spec.layout.micro_batch_tokens, side="right")))
            for sample in range(0, group_size, num_samples):
                yield _DecodingBatch(first, count, sample, min(num_samples, group_size - sample))
            first += count

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        scores = self._score(sequences, temperature, NO_EXTRAS)
        return Logprobs(values=scores.like(scores.values[:, 0]))

    def top_logprobs(self, sequences: Sequences, temperature: float, count: int) -> TopLogprobs:
        scores = self._score(sequences, temperature, Extras(top=count))
        return TopLogprobs(values=scores.like(to_records(scores.values)), is_scored=np.ones(len(scores), np.bool_))

    def _score(self, sequences: Sequences, temperature: float, extras: Extras) -> Packed:
        """Return the scores of each response token, [T, ...]."""
        import torch

        layout, vision = self._spec.layout, self._vision
        limit = None if vision is None else vision.limit_patches(sequences, layout.micro_batch_patches)
        pieces = build_micro_batches(sequences, layout.micro_batch_tokens, patches=limit)
        with self.within_memory(), torch.inference_mode():
            scores = [
                token_scores(self._model, sequences.take(rows), temperature, extras, vision=vision).cpu().numpy()
                for rows in pieces
            ]
        return restore_order(sequences.response_ids, pieces, scores)

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        import torch

        self._version = None
        state = sent_weights(self._model.state_dict(), self._spec.lora)
        values = {transfer_name(name): value for name, value in state.items()}
        expected = ExpectedWeights.of_model(self._model, self._spec)
        for experts in expected.experts.values():
            values |= experts
        with torch.no_grad():
            for name, tensor in expected.check(self._spec.role, weights):
                values[name].copy_(tensor)
        self._version = self.journal.version = version


ENGINE = EngineKind(
    engine=TransformersEngine,
    routing_replay=True,
    training_memory=TORCH_TRAINING,
    receives_weights_by=frozenset({"object_store"}),
)
