"""Every worker an actor of Ray, where the plan says."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.recipe import Model


class RayRuntime:
    """Workers are actors, pinned to the GPUs of the plan."""

    def check(self, plan: Plan) -> None:
        raise NotImplementedError

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Mapping[str, Any]]:
        raise NotImplementedError
        yield {}
