"""Turns of conversations, taken in workers."""

import copy
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from rlflow.environments.base import Environment, Observation, find_environment
from rlflow.errors import first_line
from rlflow.rewards.base import Failure, Found, Row

# Of what an environment says in one turn: more is a mistake, and would be a long time tokenised.
_MOST_CHARACTERS = 2**20


@dataclass(frozen=True)
class Answer:
    """What became of one turn."""

    text: str
    done: bool
    reward: float
    state: bytes
    """The environment, pickled."""


@dataclass(frozen=True)
class Turns:
    """What a pool is to call for an environment, with the text of a turn and, in place of a row of the data set, that
    row and the state after the turn before, or None before the first."""

    environment: str
    options: Mapping[str, Any]
    timeout_s: float
    what: ClassVar[str] = "environment"

    def find(self, name: str) -> Found:
        """Raises RecipeError at the paths ``environment`` and ``options``."""
        environment = find_environment(self.environment, self.options)
        call = partial(_turns, environment)
        return Found(call, environment.batch_size, self.timeout_s, check=lambda answer, text: answer)


def _turns(
    environment: Environment, texts: Sequence[str], begun: Sequence[tuple[Row, bytes | None]]
) -> list[Answer | Failure]:
    return [_turn(environment, text, row, state) for text, (row, state) in zip(texts, begun, strict=True)]


def _turn(new: Environment, text: str, row: Row, state: bytes | None) -> Answer | Failure:
    """Whatever the environment does: one that fails takes none with it that are in the same call."""
    try:
        if state is None:
            environment = copy.deepcopy(new)
            environment.reset(row)
        else:
            environment = pickle.loads(state)
        observation = environment.step(text)
    except BaseException as error:  # whatever the user's own class raises, sys.exit too
        return Failure("raised", f"failed ({first_line(error)})")
    if reason := _mistake(observation):
        return Failure("invalid", f"answered {reason} to {text[:80]!r}")
    try:
        state = pickle.dumps(environment)
    except Exception as error:  # pickle raises errors of many kinds
        return Failure("invalid", f"cannot be kept between turns ({first_line(error)})")
    # What is derived from a text or a number stays here: where this is read, its class is not known.
    return Answer(str(observation.text), observation.done, float(observation.reward), state)


def _mistake(observation: Any) -> str | None:
    """What is wrong with what a step gave."""
    if type(observation) is not Observation:
        return f"{str(observation)[:80]!r}, which is no Observation,"
    if not isinstance(observation.text, str) or not isinstance(observation.done, bool):
        return f"{str(observation)[:160]}, whose text is to be a text and whose done is to be true or false,"
    if len(observation.text) > _MOST_CHARACTERS:
        return f"a text of {len(observation.text)} characters"
    reward = observation.reward
    if not isinstance(reward, Real) or not math.isfinite(reward):
        return f"a reward of {str(reward)[:80]}"
    return None
