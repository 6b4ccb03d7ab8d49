"""Engines without a model that take no time: one generates, one scores and trains.

They read and return as many values as engines with a model do.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Prompts, Repeated, Rollouts, Sequences
from rlflow.batch.packed import offsets_of
from rlflow.engines.base import EngineSpec, Sampling, TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.resources.time.lengths import Lengths
from rlflow.runtime.ray.worker import EngineWorker

# Samples that an engine generates at once: vLLM's own limit on GPUs with less than 70 GiB.
SLOTS = 256
MEAN, LIMIT = 100, 1000
_LENGTHS = np.array(Lengths.log_normal(MEAN, LIMIT).values, np.int64)
_TEXT = "0" * LIMIT


@dataclass(frozen=True, slots=True)
class _Response:
    length: int
    is_done: bool = True


class InstantGenerator(SessionEngine, FakeEngine):
    """An engine that has finished all samples that fit as soon as it gets them. Lengths follow from keys."""

    _steps = 0

    @property
    def capacity(self) -> tuple[int, int]:
        return SLOTS, 2**40

    @property
    def decode_steps(self) -> int:
        return self._steps

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        # Two odd multipliers, so that neighboring samples have lengths that differ.
        drawn = (samples.keys[:, 1] * 7919 + samples.keys[:, 2] * 104729) % len(_LENGTHS)
        futures: list[Future[Any]] = []
        for length in _LENGTHS[drawn].tolist():
            futures.append(Future())
            futures[-1].set_result(_Response(min(length, sampling.max_tokens)))
        self._steps += MEAN
        return futures

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        """Do nothing, because all responses are done."""

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        lengths = np.array([each.length for each in responses])
        ids = Packed(np.zeros(lengths.sum(), np.int32), offsets_of(lengths))
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=ids,
            logprobs=ids.like(np.zeros(len(ids.values), np.float32)),
            versions=Repeated(np.zeros(len(lengths), np.int32), lengths),
            temperature=1.0,
            finished=lengths < sampling.max_tokens,
            texts=tuple(_TEXT[:length] for length in lengths.tolist()),
            rows=samples.rows,
        )

    def take_activity(self) -> list[EngineActivity]:
        return []


class InstantTrainer(FakeEngine):
    """An engine that reads every value when it scores or trains, and computes nothing."""

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        _read(sequences.prompt_ids)
        return Logprobs(values=sequences.response_ids.like(sequences.response_ids.values.astype(np.float32)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        columns = (minibatch.prompt_ids, minibatch.response_ids, minibatch.weights, *minibatch.columns.values())
        return Metrics(values={"loss": sum(map(_read, columns)), "logprob_change": 0.0})


class InstantWorker(EngineWorker):
    """A worker process with one of these engines."""

    def build(self, engine: str, spec: EngineSpec) -> None:
        self._engine: Any = InstantGenerator(spec) if "Generates" in spec.capabilities else InstantTrainer(spec)
        if "Generates" in spec.capabilities:
            self._engine_thread = None


def _read(column: Packed) -> float:
    return float(column.values.sum())
