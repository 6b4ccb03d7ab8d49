"""From an engine's name to what it can do and to its class, importing no model library."""

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from rlflow.engines.base import Engine, capabilities_of
from rlflow.resources.memory.state import TrainingMemory

_NOT_ENGINES = {"allocator", "base", "buckets", "group_progress", "registry"}


@dataclass(frozen=True)
class EngineKind:
    capabilities: frozenset[str]
    parallel: frozenset[str]
    """The ways in which it can be spread over GPUs: tensor, pipeline, data, sequence."""
    package: str | None
    """The extra that brings what it needs."""
    concurrent: bool
    """Whether its ``generate`` may be called from several threads at once."""
    training_memory: TrainingMemory
    """How it keeps the state of a model that it trains, for the planner."""

    @property
    def can_go_on(self) -> bool:
        """Whether a generation can end before all is written, and what is there go on in another: by ``write_on``, or
        where samples are given to the engine one by one, in a process of its own."""
        return (self.concurrent and self.package is not None) or "Continues" in self.capabilities


@cache
def engine_names() -> list[str]:
    """All names that a recipe may use: the modules of this folder."""
    modules = {found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]) if not found.ispkg}
    return sorted(modules - _NOT_ENGINES)


@cache
def engine_kind(name: str) -> EngineKind:
    """``name`` must be one of ``engine_names()``."""
    engine = engine_class(name)
    memory = engine.training_memory or TrainingMemory()
    return EngineKind(capabilities_of(engine), engine.parallel, engine.package, engine.concurrent, memory)


def engine_class(name: str) -> type[Engine]:
    """Importing it imports no model library; building one does."""
    engine: type[Engine] = import_module(f"rlflow.engines.{name}").ENGINE
    return engine
