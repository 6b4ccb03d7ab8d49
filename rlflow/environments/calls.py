"""Calls of an environment in worker processes, each answered as soon as its process is done."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from select import select

from rlflow.environments.turn import EnvironmentSpec, TurnResult
from rlflow.errors import EngineError, first_line
from rlflow.rewards.base import Failure, Row
from rlflow.rewards.calls import Call, CallQueue
from rlflow.rewards.pool import ProcessPool
from rlflow.rewards.processes import num_own_cpus

Answer = TurnResult | Failure
_Question = tuple[str, Row, str | bytes | None]


class EnvironmentCalls:
    """The worker processes of an environment. They end with this object."""

    def __init__(self, spec: EnvironmentSpec, num_processes: int | None) -> None:
        """Load the environment, and start processes when they are needed. Raises RecipeError and EngineError."""
        name = spec.environment
        pool = ProcessPool({name: spec}, num_processes or num_own_cpus())
        self._name, self._batch_size = name, pool.callables[name].batch_size
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Answer]] = {}
        self._queue = CallQueue()
        # The thread must not hold this object, whose end is the thread's.
        threading.Thread(
            target=_serve, args=(pool, self._queue, self._answers), name=f"environment {name}", daemon=True
        ).start()
        weakref.finalize(self, self._queue.close)

    def submit(self, questions: Sequence[_Question]) -> "list[Future[Answer]]":
        """Call the environment on the model's turns; return a future for each answer, in their order.

        A question is the text of the turn, the conversation's row of the data set, and the environment's state.
        """
        numbers = [next(self._numbers) for _ in questions]
        futures: list[Future[Answer]] = [Future() for _ in questions]
        self._answers |= dict(zip(numbers, futures, strict=True))
        for start in range(0, len(questions), self._batch_size):
            part = questions[start : start + self._batch_size]
            texts, states = [text for text, _, _ in part], [(row, state) for _, row, state in part]
            self._queue.put(Call(self._name, numbers[start : start + self._batch_size], texts, states))
        return futures


def _serve(pool: ProcessPool, queue: CallQueue, answers: "dict[int, Future[Answer]]") -> None:
    """Answer the calls in the queue until it is closed; the thread of the processes."""
    try:
        with closing(pool.outcomes(queue)) as answered_calls:
            for call, outcomes in answered_calls:
                for number, outcome in zip(call.indices, outcomes, strict=True):
                    answers.pop(number).set_result(outcome)
    except BaseException as error:  # without an answer, conversations would wait forever
        failure = error if isinstance(error, EngineError) else EngineError(f"environments: {first_line(error)}.")
        while queue.is_open:
            for number in list(answers):
                answers.pop(number).set_exception(failure)
            select([queue], [], [])
            queue.take()
    finally:
        pool.stop()
