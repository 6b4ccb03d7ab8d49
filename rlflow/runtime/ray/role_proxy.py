"""A role as the graph sees it: one engine, whatever the number of its workers.

The rule: split by data-parallel rank, call, join in the order of the rows.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

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
from rlflow.engines.base import Sampling, TokenLoss
from rlflow.errors import EngineError
from rlflow.resources.layout import Layout
from rlflow.runtime.generation.engine_group import Writing
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.sharding import TOKENS, Cost, Index, divide_rows
from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.objects.store import check_lengths

if TYPE_CHECKING:
    from rlflow.runtime.ray.gpu_turns import Turns

_FIRST = np.array([0])


class Workers(Protocol):
    """The workers of a role, by rank."""

    def __len__(self) -> int: ...

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        """Calls a method of the worker's engine; a Part arrives as these rows of the batch. Of a result that is not
        wanted nothing comes back. The future raises EngineError or a UserError."""

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones; the others go on. Raises EngineError."""

    def copy_weights(self, source: "Workers", version: int) -> object:
        """Hands the weights of ``source`` to all of these. Raises EngineError when any has not taken all of them."""


class RoleProxy:
    """Has the methods of every capability; the engine behind it has those that the graph asks for."""

    def __init__(
        self, role: str, workers: Workers, layout: Layout, concurrent: bool, turns: "Turns", cost: Cost = TOKENS
    ) -> None:
        """``concurrent`` are engines that take more prompts while they write. By ``cost`` rows are divided among
        ranks."""
        self.writing = Writing(role, workers, self._renew) if concurrent else None
        self._copied: tuple[Workers, int] | None = None
        """The workers whose weights these have, and their version."""
        self._role = role
        self.workers = workers
        self._width = layout.sequence_parallel_size
        self._turns = turns
        self._cost = cost

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        self._turns.take(self._role)
        if self.writing is not None:
            return self.writing.generate(prompts, sampling)
        # An engine that takes nothing more while it writes has its share from the beginning.
        parts = [part for part in np.array_split(np.arange(len(prompts)), len(self.workers)) if len(part)]
        whole = SharedBatch(prompts)
        calls = [self.workers.submit(rank, "generate", whole.slice(part), sampling) for rank, part in enumerate(parts)]
        return Rollouts.concatenate(wait_all(calls))

    def continue_rollouts(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None, enough: int) -> Rollouts:
        self._turns.take(self._role)
        if self.writing is not None:
            return self.writing.continue_rollouts(prompts, sampling, begun, enough)
        # The engines that can and take nothing more while they write have one worker.
        written: Rollouts = wait_all([self.workers.submit(0, "continue_rollouts", prompts, sampling, begun, enough)])[0]
        return written

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._split(sequences, "logprobs", temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._split(sequences, "base_logprobs", temperature))

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._split(sequences, "values"))

    def evaluate(self, sequences: Sequences) -> Rewards:
        values = np.empty(len(sequences), np.float32)
        for rank, result, rows in self._of_shares(sequences, sequences.as_sequences(), "evaluate"):
            if len(result.values) != len(rows):
                raise EngineError(
                    f"role {self._role}: worker {rank} has evaluated {len(result.values)} of {len(rows)} responses."
                )
            values[rows] = result.values
        return Rewards(values=values)

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """The metrics are those of the whole minibatch, which every rank has."""
        self._turns.take(self._role)
        whole, idle = SharedBatch(minibatch), SharedBatch(_without_weight(minibatch.take(_FIRST)))
        calls = []
        for rank, rows in self._ranks(divide_rows(minibatch, self._num_shares, self._cost)):
            part = whole.slice(rows) if len(rows) else idle.slice(_FIRST)
            calls.append(self.workers.submit(rank, "update", part, loss))
        metrics: Metrics = wait_all(calls)[0]
        return metrics

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def restore(self, folder: Path) -> None:
        self._everywhere("restore", folder.absolute())

    def export(self, folder: Path) -> None:
        self._everywhere("export", folder.absolute())

    def weights(self) -> Workers:
        """The workers that have them: tensors do not pass through this process."""
        self._turns.hand_on(self._role)
        return self.workers

    def load_weights(self, weights: Workers, version: int) -> None:
        """Raises EngineError when any worker has not taken all of them."""
        self._turns.take_over(self._role)
        self.workers.copy_weights(weights, version)
        self._turns.renewed(self._role)
        self._copied = weights, version
        if self.writing is not None:
            self.writing.renewed()

    def _renew(self) -> None:
        """Copy the weights in force once more, to engines that are new, in the middle of a generation."""
        assert self._copied is not None, "engines that follow nobody are never without weights"
        weights, version = self._copied
        self._turns.hand_on(self._turns.role_of(weights))
        self.load_weights(weights, version)
        self._turns.take(self._role)

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """Of every worker, from its next call on."""
        wait_all([self.workers.submit(rank, "set_micro_batch_tokens", tokens) for rank in range(len(self.workers))])

    def set_max_num_seqs(self, number: int) -> None:
        """Likewise."""
        wait_all([self.workers.submit(rank, "set_max_num_seqs", number) for rank in range(len(self.workers))])

    def memory_share(self) -> float:
        """Of the worker that has the least left."""
        shares = wait_all([self.workers.submit(rank, "memory_share") for rank in range(len(self.workers))])
        return float(max(shares))

    @property
    def _num_shares(self) -> int:
        return len(self.workers) // self._width

    def _everywhere(self, method: str, folder: Path) -> None:
        self._turns.take(self._role)
        wait_all([self.workers.submit(rank, method, folder) for rank in range(len(self.workers))])

    def _ranks(self, parts: Sequence[Index]) -> Iterable[tuple[int, Index]]:
        """Each rank with its rows; the sequence-parallel ranks of a share have the same."""
        return ((rank, parts[rank // self._width]) for rank in range(len(self.workers)))

    def _split(self, sequences: Sequences, method: str, *arguments: Any) -> Packed:
        columns, of_rows = [], []
        for rank, result, rows in self._of_shares(sequences, sequences.as_sequences(), method, *arguments):
            what = f"role {self._role}: {method} of worker {rank}"
            check_lengths(what, result.values, sequences.response_ids.lengths[rows])
            columns.append(result.values)
            of_rows.append(rows)
        return Packed.concatenate(columns).take(np.argsort(np.concatenate(of_rows)))

    def _of_shares(
        self, sequences: Sequences, sent: Sequences, method: str, *arguments: Any
    ) -> Iterable[tuple[int, Any, Index]]:
        """For each share of ``sent``: the rank of its first worker, what that has made of it, and its rows.

        Ranks without rows work on the first one: sharded models need all ranks for every pass.
        """
        self._turns.take(self._role)
        parts, whole = divide_rows(sequences, self._num_shares, self._cost), SharedBatch(sent)
        calls = [
            self.workers.submit(
                rank,
                method,
                whole.slice(rows if len(rows) else _FIRST),
                *arguments,
                # Each of the ranks that share a sequence has all of the result.
                wanted=rank % self._width == 0 and len(rows) > 0,
            )
            for rank, rows in self._ranks(parts)
        ]
        results = wait_all(calls)[:: self._width]
        ranks = range(0, len(self.workers), self._width)
        return [each for each in zip(ranks, results, parts, strict=True) if len(each[2])]


def _without_weight(minibatch: Minibatch) -> Minibatch:
    return replace(minibatch, weights=Repeated(np.zeros(len(minibatch), np.float32), minibatch.response_ids.lengths))
