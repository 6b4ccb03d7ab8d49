"""Environments that take their time."""

import time

from rlflow.environments.base import Environment, Observation


class Hanging(Environment):
    """An environment that never answers."""

    def step(self, text: str) -> Observation:
        time.sleep(1000)
        raise AssertionError
