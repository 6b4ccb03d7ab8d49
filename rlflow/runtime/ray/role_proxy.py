"""A role as the graph sees it: one engine, whatever the number of its workers.

Each method splits its rows by data-parallel rank, calls the workers, and joins the results in the order of the rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    TopLogprobs,
    ValueEstimates,
)
from rlflow.engines.base import Sampling, TokenLoss
from rlflow.engines.group_progress import GroupProgress
from rlflow.errors import EngineError
from rlflow.resources.layout import Layout
from rlflow.runtime.generation.dispatcher import LaterSteps
from rlflow.runtime.generation.engine_group import EngineGroup, Line
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.results import check_lengths
from rlflow.runtime.objects.sharding import TOKENS, Cost, Index, divide_rows
from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.protocols import Workers
from rlflow.runtime.ray.gpu_turns import GpuTurns

_FIRST_ROW = np.array([0])


class RoleProxy:
    """An engine with the methods of every capability. The engines behind it have those that the graph asks for."""

    def __init__(
        self,
        role: str,
        workers: Workers,
        layout: Layout,
        concurrent: bool,
        turns: GpuTurns,
        cost: Cost = TOKENS,
        *,
        is_frozen: bool = False,
    ) -> None:
        """Stand for a role. ``cost`` decides how rows are divided among the ranks.

        Engines that are ``concurrent`` accept more prompts while they generate. Those of a role that ``is_frozen``
        always have their initial weights.
        """
        self.workers = workers
        self.engine_group = EngineGroup(role, workers, self._resync_weights) if concurrent else None
        self._role = role
        self._ranks_per_share = layout.ranks_per_share
        self._turns = turns
        self._cost = cost
        self._is_frozen = is_frozen
        self._failures: list[Line] = []
        self._last_sync: tuple[Workers, int] | None = None
        """The workers whose weights the role has, and the weights' version."""
        self.resync: Callable[[], None] = self._resync_last_weights
        """Syncs weights to all workers in the middle of a generation, because all of them are new."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        self._turns.take(self._role)
        if self.engine_group is not None:
            return self.engine_group.generate(prompts, sampling)
        # An engine that accepts no more prompts while it generates gets its share at once.
        shares = [share for share in np.array_split(np.arange(len(prompts)), len(self.workers)) if len(share)]
        batch = SharedBatch(prompts)
        calls = [
            self.workers.submit(rank, "generate", batch.slice(share), sampling) for rank, share in enumerate(shares)
        ]
        parts: list[Rollouts] = wait_all(calls)
        rollouts = Rollouts.concatenate(parts)
        GroupProgress(prompts, sampling).check(rollouts, range(len(prompts) * sampling.group_size))
        return rollouts

    def generate_ahead(
        self, prompts: Prompts, sampling: Sampling, partial: Rollouts | None, ahead: LaterSteps
    ) -> Rollouts | None:
        """Resume ``partial`` and start others, until all are done or interrupted; on concurrent engines only."""
        assert self.engine_group is not None
        self._turns.take(self._role)
        return self.engine_group.generate_ahead(prompts, sampling, partial, ahead)

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._token_values(sequences, "logprobs", temperature))

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        return Logprobs(values=self._token_values(sequences, "base_logprobs", temperature))

    def top_logprobs(self, sequences: Sequences, temperature: float, count: int) -> TopLogprobs:
        values = self._token_values(sequences, "top_logprobs", temperature, count)
        return TopLogprobs(values=values, is_scored=np.ones(len(sequences), np.bool_))

    def values(self, sequences: Sequences) -> ValueEstimates:
        return ValueEstimates(values=self._token_values(sequences, "values"))

    def evaluate(self, sequences: Sequences) -> Rewards:
        values = np.empty(len(sequences), np.float32)
        for rank, result, rows in self._call_shares(sequences, "evaluate"):
            if len(result.values) != len(rows):
                raise EngineError(
                    f"role {self._role}: worker {rank} has evaluated {len(result.values)} of {len(rows)} responses."
                )
            values[rows] = result.values
        return Rewards(values=values)

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """Make one optimizer step. The metrics are those of the whole minibatch, which every rank has."""
        self._turns.take(self._role)
        batch, idle = SharedBatch(minibatch), SharedBatch(_without_weight(minibatch.take(_FIRST_ROW)))
        calls = []
        for rank, rows in self._rank_rows(divide_rows(minibatch, self._num_shares, self._cost)):
            rows_of_rank = batch.slice(rows) if len(rows) else idle.slice(_FIRST_ROW)
            calls.append(self.workers.submit(rank, "update", rows_of_rank, loss))
        metrics: Metrics = wait_all(calls)[0]
        return metrics

    def save(self, folder: Path) -> None:
        self._call_with_folder("save", folder)

    def restore(self, folder: Path) -> None:
        self._call_with_folder("restore", folder)

    def export(self, folder: Path) -> None:
        self._call_with_folder("export", folder)

    def weights(self) -> Workers:
        """Return the workers that have the weights: tensors do not pass through this process."""
        self._turns.prepare_sender(self._role)
        return self.workers

    def load_weights(self, weights: Workers, version: int) -> None:
        """Copy weights to all workers. Raises EngineError when one has not loaded all of them."""
        self._turns.prepare_receiver(self._role)
        self.workers.sync_weights(weights, version)
        self._turns.weights_loaded(self._role)
        self._last_sync = weights, version
        if self.engine_group is not None:
            self.engine_group.weights_synced()

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """Set the size of micro-batches of every worker, from its next call on."""
        self._call_all("set_micro_batch_tokens", tokens)

    def set_max_num_seqs(self, number: int) -> None:
        """Set the number of sequences that each worker generates at once, from its next call on."""
        self._call_all("set_max_num_seqs", number)

    def memory_share(self) -> float:
        """Return the used share of GPU memory of the worker that has the least memory left."""
        return float(max(self._call_all("memory_share")))

    def start_profile(self) -> None:
        """Have each worker record its operations until ``write_profile``."""
        self._call_all("start_profile")

    def write_profile(self, folder: Path) -> None:
        """Have each worker write a trace of its operations."""
        self._call_all("write_profile", folder.absolute())

    def take_failures(self) -> list[Line]:
        """Return a line for each engine that failed and was replaced since the last call."""
        failures, self._failures = self._failures, []
        return failures + (self.engine_group.take_failures() if self.engine_group else [])

    def _resync_weights(self) -> None:
        self.resync()
        self._turns.take(self._role)

    def _resync_last_weights(self) -> None:
        """Copy the current weights once more."""
        assert self._last_sync is not None, "engines of a role that follows no other always have their weights"
        weights, version = self._last_sync
        self._turns.prepare_sender(self._turns.role_of(weights))
        self.load_weights(weights, version)

    @property
    def _num_shares(self) -> int:
        return len(self.workers) // self._ranks_per_share

    def _rank_rows(self, shares: Sequence[Index]) -> Iterable[tuple[int, Index]]:
        """Return each rank with its rows; the sequence-parallel ranks of a share have the same rows."""
        return ((rank, shares[rank // self._ranks_per_share]) for rank in range(len(self.workers)))

    def _token_values(self, sequences: Sequences, method: str, *arguments: Any) -> Packed:
        """Return a value for each response token, from a method of the engines."""
        columns, rows_of_columns = [], []
        for rank, result, rows in self._call_shares(sequences, method, *arguments):
            name = f"role {self._role}: {method} of worker {rank}"
            check_lengths(name, result.values, sequences.response_ids.lengths[rows])
            columns.append(result.values)
            rows_of_columns.append(rows)
        return Packed.concatenate(columns).take(np.argsort(np.concatenate(rows_of_columns)))

    def _call_shares(self, sequences: Sequences, method: str, *arguments: Any) -> Iterable[tuple[int, Any, Index]]:
        """Return for each share of the rows: the rank of its first worker, that worker's result, and the rows.

        If a process of a frozen role has died, new ones repeat the call.
        """
        self._turns.take(self._role)
        try:
            return self._call_ranks(sequences, method, *arguments)
        except EngineError as error:
            dead = self.workers.dead_ranks() if self._is_frozen else []
            if not dead:
                raise
            self._failures += [{"engine": rank, "failed": str(error)} for rank in dead]
            # The ranks of a sharded model meet in every pass, so all of them are replaced.
            self.workers.restart(range(len(self.workers)))
            return self._call_ranks(sequences, method, *arguments)

    def _call_ranks(self, sequences: Sequences, method: str, *arguments: Any) -> Iterable[tuple[int, Any, Index]]:
        """Call the method once for all rows.

        Ranks without rows work on the first row: sharded models need all ranks for every pass.
        """
        shares = divide_rows(sequences, self._num_shares, self._cost)
        if method != "logprobs" or self._is_frozen:  # only a trained policy uses the experts of the sampler
            sequences = replace(sequences, routing=None)
        batch = SharedBatch(sequences.as_sequences())
        calls = [
            self.workers.submit(
                rank,
                method,
                batch.slice(rows if len(rows) else _FIRST_ROW),
                *arguments,
                # Each of the ranks that share a sequence has all of the result.
                wanted=rank % self._ranks_per_share == 0 and len(rows) > 0,
            )
            for rank, rows in self._rank_rows(shares)
        ]
        results = wait_all(calls)[:: self._ranks_per_share]
        ranks = range(0, len(self.workers), self._ranks_per_share)
        return [share for share in zip(ranks, results, shares, strict=True) if len(share[2])]

    def _call_with_folder(self, method: str, folder: Path) -> None:
        self._turns.take(self._role)
        self._call_all(method, folder.absolute())

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return wait_all([self.workers.submit(rank, method, *arguments) for rank in range(len(self.workers))])


def _without_weight(minibatch: Minibatch) -> Minibatch:
    return replace(minibatch, weights=Repeated(np.zeros(len(minibatch), np.float32), minibatch.response_ids.lengths))
