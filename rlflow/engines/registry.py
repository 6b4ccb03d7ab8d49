"""From an engine's name to what it can do and to its class, importing no model library."""

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from rlflow.engines.base import Engine, capabilities_of
from rlflow.errors import RecipeError


@dataclass(frozen=True)
class EngineKind:
    capabilities: frozenset[str]
    parallel: frozenset[str]
    """The ways in which it can be spread over GPUs: tensor, pipeline, data, sequence."""


# Engines that a plan may place and that this version does not start.
_PLANNED_ONLY = {
    "deepspeed": EngineKind(frozenset({"Trains", "Scores", "Values"}), frozenset({"data", "sequence"})),
    "vllm": EngineKind(frozenset({"Generates", "Follows"}), frozenset({"data", "tensor", "pipeline"})),
}
_NOT_ENGINES = {"base", "registry"}


@cache
def engine_names() -> list[str]:
    """All names that a recipe may use: the modules of this folder, and what is planned only."""
    modules = {found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]) if not found.ispkg}
    return sorted((modules - _NOT_ENGINES) | _PLANNED_ONLY.keys())


@cache
def engine_kind(name: str) -> EngineKind:
    """``name`` must be one of ``engine_names()``."""
    if name in _PLANNED_ONLY:
        return _PLANNED_ONLY[name]
    engine = engine_class(name)
    return EngineKind(capabilities_of(engine), engine.parallel)


def engine_class(name: str) -> type[Engine]:
    """Raises RecipeError, at the path ``engine``, for one that can be planned for and not started."""
    if name in _PLANNED_ONLY:
        known = [other for other in engine_names() if other not in _PLANNED_ONLY]
        raise RecipeError(
            "engine",
            f"'{name}' can be planned for, and this version does not start it",
            known=known,
            fix="dry_run=true",
        )
    engine: type[Engine] = import_module(f"rlflow.engines.{name}").ENGINE
    return engine
