"""Generates and scores with a model of the transformers library, in this process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Prompts, Repeated, Rollouts, Sequences
from rlflow.engines.base import FP32_TRAINING, EngineSpec, Sampling, WeightTransport, sample_seed
from rlflow.engines.causal_lm.adapters import add_adapters, copied_name, trained
from rlflow.engines.causal_lm.decoding import decode
from rlflow.engines.causal_lm.kernels import attention_of
from rlflow.engines.causal_lm.micro_batches import in_order, micro_batches
from rlflow.engines.causal_lm.packing import token_scores
from rlflow.engines.causal_lm.pretrained import end_ids, load_model, load_tokenizer
from rlflow.engines.group_progress import GroupProgress, PartialResponse, prepend_partial
from rlflow.engines.memory import TunableEngine
from rlflow.errors import EngineError
from rlflow.resources.memory.state import TrainingMemory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Turn:
    """What is written at once: so many samples of each of so many prompts, from these on."""

    prompt: int
    prompts: int
    sample: int
    samples: int


class TransformersEngine(TunableEngine):
    parallel: ClassVar[frozenset[str]] = frozenset()
    package: ClassVar[str | None] = None
    concurrent: ClassVar[bool] = False
    training_memory: ClassVar[TrainingMemory | None] = FP32_TRAINING
    sends_weights_by: ClassVar[frozenset[WeightTransport]] = frozenset()
    receives_weights_by: ClassVar[frozenset[WeightTransport]] = frozenset({"object_store"})

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        self._spec = spec
        dtype = getattr(torch, spec.model.dtype)
        self._model = load_model(
            spec.model_name,
            spec.model,
            device=spec.device,
            dtype=dtype,
            seed=spec.seed,
            attention=attention_of(spec),
        )
        add_adapters(self._model, spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        self._end_ids = end_ids(self._model.generation_config.eos_token_id, self._tokenizer.eos_token_id)
        self._version: int | None = 0

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        self._check_version()
        samples = prompts.repeat(sampling.group_size)
        seeds = [sample_seed(self._spec.seed, key) for key in samples.keys]
        ids, logprobs, finished = [], [], []
        for turn in self._turns(prompts.ids.lengths, sampling.group_size):
            of_each = replace(sampling, group_size=turn.samples)
            part = prompts.ids.take(np.arange(turn.prompt, turn.prompt + turn.prompts))
            first = turn.prompt * sampling.group_size + turn.sample
            part_seeds = seeds[first : first + turn.prompts * turn.samples]
            decoded = decode(self._model, part, of_each, part_seeds, self._end_ids)
            ids += decoded.ids
            logprobs += decoded.logprobs
            finished.append(decoded.finished)
        return self._rollouts(samples, sampling, ids, np.concatenate(logprobs), np.concatenate(finished))

    def continue_rollouts(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None, enough: int) -> Rollouts:
        self._check_version()
        groups = GroupProgress(prompts, sampling, begun)
        rows = np.flatnonzero(~groups.done)
        samples, before = prompts.repeat(sampling.group_size).take(rows), groups.partial_responses(rows)
        texts = [np.concatenate([samples.ids[row], each.ids]) for row, each in enumerate(before)]
        ids = Packed.from_rows(texts, np.int32)
        seeds = [sample_seed(self._spec.seed, key) for key in samples.keys]
        alone = replace(sampling, group_size=1)
        new = []
        for turn in self._turns(ids.lengths, 1):
            if groups.num_complete >= enough:
                break
            part = np.arange(turn.prompt, turn.prompt + turn.prompts)
            stop = partial(_ended, groups, rows[part], enough)
            part_seeds = seeds[turn.prompt : turn.prompt + turn.prompts]
            written = groups.initial_lengths[rows[part]]
            decoded = decode(self._model, ids.take(part), alone, part_seeds, self._end_ids, written, stop)
            finished, scores = decoded.finished, np.concatenate(decoded.logprobs)
            new.append(
                self._rollouts(samples.take(part), sampling, decoded.ids, scores, finished, before[turn.prompt :])
            )
        joined = groups.merge(new)
        assert joined is not None, "nothing is asked for"
        return joined

    def _rollouts(
        self,
        samples: Prompts,
        sampling: Sampling,
        ids: Sequence[NDArray[np.int32]],
        scores: NDArray[np.float32],
        finished: NDArray[np.bool_],
        before: Sequence[PartialResponse] = (),
    ) -> Rollouts:
        """``ids`` and their logprobs, ``scores``, are new; ``before`` are the beginnings of the responses, if any."""
        response_ids = Packed.from_rows(ids, np.int32)
        logprobs = response_ids.like(scores)
        versions = Repeated(np.full(len(response_ids), self._version, np.int32), response_ids.lengths)
        if before:
            response_ids, logprobs, versions = prepend_partial(before[: len(samples)], response_ids, logprobs, versions)
        written = [response_ids[row] for row in range(len(samples))]
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=response_ids,
            logprobs=logprobs,
            versions=versions,
            temperature=sampling.scoring_temperature,
            finished=finished,
            texts=tuple(self._tokenizer.batch_decode(written, skip_special_tokens=True)),
            rows=samples.rows,
        )

    def _check_version(self) -> None:
        if self._version is None:
            raise EngineError(f"role {self._spec.role}: the last copy of weights failed, and its model is half old.")

    def _turns(self, lengths: NDArray[np.int64], group_size: int) -> Iterator[_Turn]:
        """No more sequences than memory was planned for, and no more tokens of prompts than go through the model."""
        samples = min(group_size, self._spec.max_num_seqs)
        most = max(1, self._spec.max_num_seqs // group_size)
        first = 0
        while first < len(lengths):
            tokens = np.cumsum(lengths[first : first + most])
            count = max(1, int(np.searchsorted(tokens, self._spec.layout.micro_batch_tokens, side="right")))
            for sample in range(0, group_size, samples):
                yield _Turn(first, count, sample, min(samples, group_size - sample))
            first += count

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        import torch

        pieces = micro_batches(sequences, self._spec.layout.micro_batch_tokens)
        with self.within_memory(), torch.inference_mode():
            scores = (token_scores(self._model, sequences.take(rows), temperature) for rows in pieces)
            values = [score.logprobs.cpu().numpy() for score in scores]
        return Logprobs(values=in_order(sequences.response_ids, pieces, values))

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        import torch

        self._version = None
        state = trained(self._model.state_dict(), self._spec.lora)
        own = {copied_name(name): weight for name, weight in state.items()}
        missing = set(own)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own or own[name].shape != tensor.shape:
                    raise EngineError(f"role {self._spec.role}: the weight '{name}' does not fit the model.")
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(f"role {self._spec.role}: the weights lack '{min(missing)}'.")
        self._version = version


def _ended(groups: GroupProgress, rows: NDArray[np.int64], enough: int, ended: NDArray[np.int64]) -> bool:
    """Notes which of ``rows`` are done; whether so many groups are whole."""
    groups.done[rows[ended]] = True
    return groups.num_complete >= enough


ENGINE = TransformersEngine
