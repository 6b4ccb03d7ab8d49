"""A registry of engines: finds an engine's class and capabilities by its name, without importing a model library."""

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from rlflow.engines.base import ChecksPackage, Engine, WeightTransport, capabilities_of
from rlflow.resources.memory.state import TrainingMemory


@dataclass(frozen=True)
class EngineKind:
    """The declarations of an engine; ``Engine`` in ``base.py`` explains the fields."""

    capabilities: frozenset[str]
    parallel: frozenset[str]
    package: str | None
    concurrent: bool
    training_memory: TrainingMemory
    sends_weights_by: frozenset[WeightTransport]
    receives_weights_by: frozenset[WeightTransport]

    @property
    def can_resume(self) -> bool:
        """Return whether a generation can stop before all responses are done and resume in a later one.

        An engine can do that by ``Continues``. An engine that runs in its own process and takes new samples while it
        generates is interrupted by the runtime, sample by sample.
        """
        return (self.concurrent and self.package is not None) or "Continues" in self.capabilities


@cache
def engine_names() -> list[str]:
    """Return all names that a recipe may use: the modules of this folder that have an ENGINE."""
    modules = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg]
    return sorted(name for name in modules if hasattr(import_module(f".{name}", __package__), "ENGINE"))


@cache
def engine_kind(name: str) -> EngineKind:
    """Return the declarations of an engine; ``name`` must be one of ``engine_names()``."""
    engine = engine_class(name)
    return EngineKind(
        capabilities=capabilities_of(engine),
        parallel=engine.parallel,
        package=engine.package,
        concurrent=engine.concurrent,
        training_memory=engine.training_memory or TrainingMemory(),
        sends_weights_by=engine.sends_weights_by,
        receives_weights_by=engine.receives_weights_by,
    )


def engine_class(name: str) -> type[Engine]:
    """Import an engine's class. Only building an engine imports its model library."""
    engine: type[Engine] = import_module(f".{name}", __package__).ENGINE
    return engine


def import_package(package: str) -> None:
    """Import a library, and run the check that the engine built on it has for its installation.

    Raises whatever error the library raises.
    """
    import_module(package)
    for name in engine_names():
        engine = engine_class(name)
        if engine.package == package and issubclass(engine, ChecksPackage):
            engine.check_package()
