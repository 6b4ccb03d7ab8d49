"""An episode at the engine that generates its calls."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.call_generator import CallRequest
from rlflow.agents.messages import EpisodeEnded
from rlflow.agents.record import CallName, EpisodeRecord, call_key
from rlflow.agents.trajectories import Rollout
from rlflow.agents.worker_process import AgentWorker
from rlflow.engines.base import Sampling
from rlflow.rewards.base import Row


@dataclass(eq=False)
class Episode:
    """An episode that an engine holds."""

    key: NDArray[np.int64]
    prompt_ids: NDArray[np.int32]
    row: Row
    sampling: Sampling
    record: EpisodeRecord
    future: "Future[Rollout]" = field(default_factory=Future)
    name: str = ""
    """The name of this attempt."""
    worker: AgentWorker | None = None
    num_failures: int = 0
    interrupted: bytes | None = None
    """The record at the moment of an interruption. The agent continues as far as it can without the model."""
    numbers: dict[int, CallName] = field(default_factory=dict)
    """The calls of this attempt by the numbers of the endpoint."""
    waiting: dict[CallName, list[int]] = field(default_factory=dict)
    """The numbers that wait for calls which are not done."""
    generating: "dict[CallName, tuple[CallRequest, Future[Any]]]" = field(default_factory=dict)
    end: EpisodeEnded | None = None
    """The outcome, if the agent ended the episode while it was interrupted."""
    is_late: bool = False
    """The worker has been told to stop it."""
    idle_since: float = 0.0
    """The time of its start, the last answer, or its interruption."""
    is_refused: bool = False
    """A limit of the recipe has refused the last call of this attempt."""
    measures: Counter[str] = field(default_factory=Counter)

    @property
    def is_live(self) -> bool:
        """Return False for an interrupted episode."""
        return self.interrupted is None

    def request(self, name: CallName) -> CallRequest:
        """Return what the engine has to generate for a call."""
        call = self.record.calls[name]
        assert call.prompt_ids is not None
        sampling = replace(self.sampling, max_tokens=call.limit, turns=None, group_size=1)
        num_routed = self.record.num_routed(call.prompt_ids)
        return CallRequest(call_key(self.key, name), call.prompt_ids, call.result.reply, sampling, num_routed)

    def begin_attempt(self, name: str, worker: AgentWorker, now: float) -> None:
        """Take note of an attempt with a fresh environment."""
        self.name, self.worker, self.idle_since = name, worker, now
        self.numbers, self.waiting, self.end, self.is_late, self.is_refused = {}, {}, None, False, False
        self.record.begin_attempt()

    def call_rewards(self, given: Mapping[str, float]) -> tuple[float, ...]:
        """Return the reward of each call that is done, given those of some replies. Raises LookupError for another."""
        rewards = {
            name: 0.0 for name, call in self.record.calls.items() if name in self.record.used and call.result.is_done
        }
        for reply, reward in given.items():
            number = reply.rpartition("-")[2]
            name = self.numbers.get(int(number)) if number.isdecimal() else None
            if name is None or name not in rewards:
                raise LookupError(reply)
            rewards[name] += reward
        return tuple(rewards.values())

    def all_measures(self) -> dict[str, float]:
        """Return what was counted, the attempts that failed, and the mean seconds between a reply and the next call."""
        waits = [call.wait_s for call in self.record.done_calls()]
        return {**self.measures, "retries": self.num_failures, "wait_seconds": sum(waits) / max(1, len(waits))}
