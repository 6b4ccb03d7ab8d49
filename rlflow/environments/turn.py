"""Turns of conversations, run in the workers of a process pool."""

import copy
import copyreg
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import NoneType
from typing import Any, ClassVar

from rlflow.environments.base import Environment, Observation, load_environment
from rlflow.errors import first_line
from rlflow.rewards.base import Failure, LoadedCallable, Row

# The longest observation. A longer one is a mistake, and would take long to tokenize.
_MAX_CHARACTERS = 2**20
# How pickle creates an object of a class that does not say how it is stored.
_NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TurnResult:
    """An environment's observation, and its state after the turn."""

    text: str
    done: bool
    reward: float
    state: str | bytes
    """The environment: its attributes as JSON where JSON can hold them, else a pickle, which is bytes."""


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
    environment: Environment, texts: Sequence[str], conversations: Sequence[tuple[Row, str | bytes | None]]
) -> list[TurnResult | Failure]:
    return [_run_turn(environment, text, row, state) for text, (row, state) in zip(texts, conversations, strict=True)]


def _run_turn(new: Environment, text: str, row: Row, state: str | bytes | None) -> TurnResult | Failure:
    """Run one turn; whatever the environment does, the other turns of the call are not affected."""
    try:
        if state is None:
            environment = copy.deepcopy(new)
            environment.reset(row)
        else:
            environment = _restored(type(new), state)
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


def _stored(environment: Environment) -> str | bytes:
    """Return the environment as JSON if that keeps all that a pickle would keep, else as a pickle."""
    kind = type(environment)
    how: Any = environment.__reduce_ex__(2)
    if how[:2] == (_NEW, (kind,)) and how[3:] == (None, None) and not hasattr(kind, "__setstate__"):
        attributes = how[2]
        if type(attributes) in (dict, NoneType) and _is_json(attributes, set()):
            return json.dumps(attributes or {})
    return pickle.dumps(environment)


def _is_json(value: object, seen: set[int]) -> bool:
    """Return whether JSON keeps this value as it is: exact types, and no list or dictionary found in two places."""
    if value is None or type(value) in (str, int, float, bool):
        return True
    if not isinstance(value, dict | list) or type(value) not in (dict, list) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, list):
        return all(_is_json(item, seen) for item in value)
    return all(type(key) is str and _is_json(item, seen) for key, item in value.items())


def _restored(kind: type[Environment], state: str | bytes) -> Environment:
    """Return the environment of this class that ``_stored`` stored."""
    if isinstance(state, bytes):
        pickled: Environment = pickle.loads(state)
        return pickled
    environment = kind.__new__(kind)
    environment.__dict__.update(json.loads(state))
    return environment


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
