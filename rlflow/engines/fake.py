"""The fake engine: nearly every capability without a model, for tests of the runtime."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import (
    Logprobs,
    Metrics,
    Minibatch,
    Packed,
    Prompts,
    Repeated,
    Rewards,
    Rollouts,
    Sequences,
    ValueEstimates,
)
from rlflow.engines.base import TORCH_TRAINING, EngineKind, EngineSpec, Sampling, TokenLoss, sample_seed
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.engines.times import ProfiledEngine
from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_STATE = "state.json"


class FakeEngine(ProfiledEngine):
    """An engine whose only weight is the number of its updates. Responses are up to four digits."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self.seed = spec, spec.seed
        self._weight = 0
        self._version: int | None = 0
        self._awake = True
        self._has_weights = True

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer of the model."""
        return load_tokenizer(self._spec.model_name, self._spec.model)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        if sampling.turns is not None:
            return sampling.turns.generate(self, prompts, sampling)
        if self._version is None or not self._awake:
            raise EngineError(f"role {self._spec.role}: cannot generate: it is asleep, or the last weight sync failed.")
        samples = prompts.repeat(sampling.group_size)
        draws = [np.random.default_rng(sample_seed(self._spec.seed, key)) for key in samples.keys]
        ids = [draw.integers(0, 10, draw.integers(1, min(4, sampling.max_tokens), endpoint=True)) for draw in draws]
        ids = [row[: _end_of_response(row, sampling.stop_ids)] for row in ids]
        response_ids = Packed.from_rows(ids, np.int32)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=response_ids,
            logprobs=self._logprobs(response_ids),
            versions=Repeated(np.full(len(response_ids), self._version, np.int32), response_ids.lengths),
            temperature=sampling.scoring_temperature,
            finished=(response_ids.lengths < sampling.max_tokens)
            | np.isin([row[-1] for row in ids], sampling.stop_ids),
            texts=tuple("".join(str(token) for token in row) for row in ids),
            rows=samples.rows,
            images=samples.images,
        )

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._logprobs(sequences.response_ids))

    def values(self, sequences: Sequences) -> ValueEstimates:
        response = sequences.response_ids
        return ValueEstimates(values=response.like(np.zeros(len(response.values), np.float32)))

    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=sequences.response_ids.lengths.astype(np.float32))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        import torch

        logprobs = torch.from_numpy(self._logprobs(minibatch.response_ids).values)
        totals = LossTotals(loss, logprobs.device, self._spec.role)
        totals.add(minibatch, logprobs, {})
        totals.check(totals.sums["loss"])
        self._weight += 1
        return Metrics(values={**weighted_means(totals.sums), "loss": 1 / self._weight})

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        import torch

        self._check_weights()
        yield "updates", torch.tensor(self._weight)

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        self._check_weights()
        self._version = None
        new = dict(weights)
        if new.keys() != {"updates"}:
            raise EngineError(f"role {self._spec.role}: the weights do not fit the model.")
        self._weight = int(new["updates"])
        self._version = version

    def sleep(self) -> None:
        self._awake = self._has_weights = False

    def wake(self, weights_only: bool = False) -> None:
        self._awake = self._awake or not weights_only
        self._has_weights = True

    def save(self, folder: Path) -> None:
        (folder / _STATE).write_text(json.dumps({"updates": self._weight}))

    def restore(self, folder: Path) -> None:
        self._weight = json.loads((folder / _STATE).read_text())["updates"]

    def export(self, folder: Path) -> None:
        self.save(folder)

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise EngineError(f"role {self._spec.role}: cannot send or load weights: it is asleep.")

    @staticmethod
    def _logprobs(response_ids: Packed) -> Packed:
        return response_ids.like(-response_ids.values.astype(np.float32) / 10)


def _end_of_response(row: NDArray[np.int64], stop_ids: Sequence[int]) -> int:
    """Return the length of a response that ends with the first of ``stop_ids``."""
    stops = np.flatnonzero(np.isin(row, stop_ids))
    return int(stops[0]) + 1 if len(stops) else len(row)


ENGINE = EngineKind(
    engine=FakeEngine,
    parallel=frozenset({"data", "tensor", "pipeline", "sequence"}),
    training_memory=TORCH_TRAINING,
    sends_weights_by=frozenset({"object_store"}),
    receives_weights_by=frozenset({"object_store"}),
)
