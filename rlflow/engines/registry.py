"""A registry of engines: finds an engine and its declarations by its name, without importing a model library."""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path

from rlflow.engines.base import EngineKind


@cache
def engine_names() -> list[str]:
    """Return all names that a recipe may use: the modules of this folder that have an ENGINE."""
    modules = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg]
    return sorted(name for name in modules if hasattr(import_module(f".{name}", __package__), "ENGINE"))


def engine_kind(name: str) -> EngineKind:
    """Return an engine's class and declarations; ``name`` must be one of ``engine_names()``."""
    kind: EngineKind = import_module(f".{name}", __package__).ENGINE
    return kind


def import_package(package: str) -> None:
    """Import a library, and run the check that the engine built on it has for its installation.

    Raises whatever error the library raises.
    """
    import_module(package)
    for kind in map(engine_kind, engine_names()):
        if kind.package == package:
            kind.check_package()
