"""Time limits for each call of a worker, from what the plan predicts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflow.batch import Batch, describe_samples
from rlflow.compiler.models import role_architecture
from rlflow.compiler.plan import Plan
from rlflow.runtime.objects.slices import BatchSlice

# A process may be silent for so many times the predicted seconds of its node, within these bounds. Even a busy process
# answers: only a call into C that never lets other threads of the process run keeps it from that.
SILENCE_FACTOR = 3.0
SILENCE_S = (20.0, 300.0)
# A process that answers is slow rather than stopped, and a prediction may be ten times too low.
_LIMIT_FACTOR = 20.0
_LIMIT_S = 3600.0
# Calls that wait for samples. An engine that makes no step in them hangs.
_GENERATING = frozenset({"advance", "generate", "preempt", "finish_session"})
# Calls that load libraries, data or models, and calls that move files.
# No figure of the plan bounds what a disk may take.
_LOADING = frozenset({"prepare", "build", "load_object", "check_host"})
_STATE = frozenset({"save", "restore", "export", "write_profile"})
_LOADING_LIMIT_S = 6 * 3600.0
# Weights and optimizer of a parameter, and what a slow disk takes in a second: a library may write a file in one call.
_STATE_BYTES, _DISK_BYTES_PER_S = 16, 1e8


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call that the run waits for. Its text says since when, for which node, and for which samples."""

    method: str
    node: str = ""
    samples: str = ""
    """The samples in its arguments."""
    silence_s: float = SILENCE_S[1]
    """How long the process may be silent meanwhile."""
    limit_s: float = _LOADING_LIMIT_S
    """How long the call may take of a process that answers."""
    counts_steps: bool = False
    """The call waits for samples of an engine that counts its steps."""
    since: float = field(default_factory=time.time)

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        waiting = f"Node {self.node} waits" if self.node else "The run waits"
        return f"{waiting} for its '{self.method}' since {clock}{f', of {self.samples}' if self.samples else ''}"


class Waits:
    """The time limits of a plan's nodes."""

    def __init__(self, node_seconds: Mapping[str, float], other_s: float, num_parameters: float = math.inf) -> None:
        """Take the predicted seconds of each node, and of calls outside the graph, such as those of an evaluation.

        ``num_parameters`` are those of the largest model.
        """
        self._node_seconds, self._other_s = node_seconds, other_s
        self._state_s = num_parameters * _STATE_BYTES / _DISK_BYTES_PER_S

    @classmethod
    def from_plan(cls, plan: Plan) -> "Waits":
        prediction = plan.prediction
        seconds = {name: time.seconds for name, time in prediction.nodes.items()}
        architectures = [role_architecture(plan.recipe, plan.graph, role) for role in plan.recipe.roles]
        num_parameters = max(
            math.inf if architecture is None else architecture.num_parameters for architecture in architectures
        )
        return cls(seconds, prediction.step_seconds + prediction.evaluation_seconds, num_parameters)

    def of(self, method: str, node: str = "", arguments: Sequence[Any] = (), *, concurrent: bool = False) -> Wait:
        """Return the wait for a method of a worker, called for ``node`` with ``arguments``.

        A ``concurrent`` engine counts its steps.
        """
        samples = _samples(arguments)
        if method in ("follow", "stay"):
            # They last as long as the engine.
            return Wait(method=method, limit_s=math.inf)
        if method in _LOADING:
            return Wait(method=method, node=node, samples=samples)
        if method in _STATE:
            return Wait(method=method, node=node, silence_s=_silence(self._state_s), limit_s=_LOADING_LIMIT_S)
        predicted = self._node_seconds.get(node, self._other_s)
        return Wait(
            method=method,
            node=node,
            samples=samples,
            silence_s=_silence(predicted),
            limit_s=max(_LIMIT_FACTOR * predicted, _LIMIT_S),
            counts_steps=concurrent and method in _GENERATING,
        )


def _silence(predicted_s: float) -> float:
    """Return how long a process may be silent in a call that takes so many seconds."""
    return min(max(SILENCE_FACTOR * predicted_s, SILENCE_S[0]), SILENCE_S[1])


def _samples(arguments: Sequence[Any]) -> str:
    """Describe the samples in the first batch among the arguments of a call."""
    for argument in arguments:
        batch, rows = (argument.shared.batch, argument.rows) if isinstance(argument, BatchSlice) else (argument, None)
        if isinstance(batch, Batch) and isinstance(keys := getattr(batch, "keys", None), np.ndarray):
            count, first = (len(keys), keys[:1]) if rows is None else (len(rows), keys[rows[:1]])
            return f"{count} row{'' if count == 1 else 's'} from {describe_samples(first)} on" if count else ""
    return ""
