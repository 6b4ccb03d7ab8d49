"""An engine that generates long responses without a model, in one of rlflow's workers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Prompts, Repeated, Rollouts, Sequences
from rlflow.engines.base import EngineSpec, Sampling, TokenLoss, sample_seed
from rlflow.engines.fake import FakeEngine
from rlflow.runtime.ray.worker import EngineWorker

LONGEST, MEAN = 8192, 1800
# One letter per token, as in models of characters.
_TEXT = "0" * LONGEST


def lengths_of(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Return log-normal lengths, truncated at the longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - 0.36, 0.9, count)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


class Writer(FakeEngine):
    """An engine that generates zeros, and reads every value in micro-batches when it scores or trains."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        samples = prompts.repeat(sampling.group_size)
        lengths = lengths_of(len(samples), sample_seed(0, samples.keys[0]))
        response_ids = Packed.from_rows([np.zeros(length, np.int32) for length in lengths], np.int32)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=response_ids,
            logprobs=response_ids.like(np.zeros(lengths.sum(), np.float32)),
            versions=Repeated(np.zeros(len(samples), np.int32), lengths),
            temperature=1.0,
            finished=lengths < LONGEST,
            texts=tuple(_TEXT[:length] for length in lengths),
            rows=samples.rows,
        )

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        pieces = [part.response_ids.values.astype(np.float32) for part in _micro_batches(sequences)]
        return Logprobs(values=sequences.response_ids.like(np.concatenate(pieces)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        total = 0.0
        for part in _micro_batches(minibatch):
            columns = (part.prompt_ids, part.response_ids, part.weights, *part.columns.values())
            total += sum(float(column.values.sum()) for column in columns)
        return Metrics(values={"logprob_change": 0.0, "loss": total})


class WriterWorker(EngineWorker):
    def build(self, engine: str, spec: EngineSpec) -> None:
        self._engine: Any = Writer(spec)


def _micro_batches(sequences: Any) -> Any:
    for rows in np.array_split(np.arange(len(sequences)), max(1, len(sequences) // 16)):
        yield sequences.take(rows)
