"""Turns of conversations, run in the workers of a process pool."""

import copy
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from rlflow.environments.base import Environment, Observation, load_environment
from rlflow.errors import first_line
from rlflow.rewards.base import Failure, LoadedCallable, Row

# The longest observation. A longer one is a mistake, and would take long to tokenize.
_MAX_CHARACTERS = 2**20


@dataclass(frozen=True)
class TurnResult:
    """An environment's observation, and its state after the turn."""

    text: str
    done: bool
    reward: float
    state: bytes
    """The environment: its attributes as JSON where JSON can hold them, else a pickle."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The name and options of an environment, from which a pool loads a function that runs its turns.

    The pool calls it with the model's texts. The argument for each text is the conversation's row of the data set
    with its state after the previous turn, or with None before the first.
    """

    environment: str
    options: Mapping[str, Any]
    timeout_s: float
    kind: ClassVar[str] = "environment"

    def load(self, name: str) -> LoadedCallable:
        """Load the function that runs turns. Raises RecipeError at the paths ``environment`` and ``options``."""
        environment = load_environment(self.environment, self.options)
        call = partial(_run_turns, environment)
        return LoadedCallable(call, environment.batch_size, self.timeout_s, check=lambda result, text: result)


def _run_turns(
    environment: Environment, texts: Sequence[str], conversations: Sequence[tuple[Row, bytes | None]]
) -> list[TurnResult | Failure]:
    return [_run_turn(environment, text, row, state) for text, (row, state) in zip(texts, conversations, strict=True)]


def _run_turn(new: Environment, text: str, row: Row, state: bytes | None) -> TurnResult | Failure:
    """Run one turn; whatever the environment does, the other turns of the call are not affected."""
    try:
        if state is None:
            environment = copy.deepcopy(new)
            environment.reset(row)
        else:
            environment = _restored(new, state)
        observation = environment.step(text)
    except BaseException as error:  # a user's class may raise anything, SystemExit included
        return Failure("raised", f"failed ({first_line(error)})")
    if problem := _problem(observation):
        return Failure("invalid", f"returned {problem} for {text[:80]!r}")
    try:
        state = _stored(environment)
    except Exception as error:  # pickle raises errors of many kinds
        return Failure("invalid", f"cannot be stored between turns ({first_line(error)})")
    # Subclasses of str and float are converted: the process that reads the result may not know them.
    return TurnResult(str(observation.text), observation.done, float(observation.reward), state)


def _stored(environment: Environment) -> bytes:
    attributes = vars(environment)
    try:
        state = json.dumps(attributes)
        if json.loads(state) == attributes:
            return state.encode()
    except (TypeError, ValueError):
        pass
    return pickle.dumps(environment)


def _restored(new: Environment, state: bytes) -> Environment:
    """Return the environment that ``_stored`` stored; ``new`` is one with the same options."""
    if is_pickle(state):
        pickled: Environment = pickle.loads(state)
        return pickled
    environment = copy.copy(new)
    environment.__dict__ = json.loads(state)
    return environment


def is_pickle(state: bytes) -> bool:
    """Return whether a stored environment is a pickle; JSON begins with a brace."""
    return not state.startswith(b"{")


def _problem(observation: Any) -> str | None:
    """Describe what is wrong with the value that ``step`` returned; None if it is valid."""
    if type(observation) is not Observation:
        return f"{str(observation)[:80]!r}, which is not an Observation,"
    if not isinstance(observation.text, str) or not isinstance(observation.done, bool):
        return f"{str(observation)[:160]}, whose text must be a string and whose done must be true or false,"
    if len(observation.text) > _MAX_CHARACTERS:
        return f"a text of {len(observation.text)} characters"
    reward = observation.reward
    if not isinstance(reward, Real) or not math.isfinite(reward):
        return f"a reward of {str(reward)[:80]}"
    return None
