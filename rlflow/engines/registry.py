"""From an engine's name to its class and what it can do, importing no model library."""

import pkgutil
from importlib import import_module
from pathlib import Path

from rlflow.engines.base import Engine, capabilities_of
from rlflow.errors import EngineError

# Engines that a plan may place and that this version does not start.
PLANNED_ONLY: dict[str, frozenset[str]] = {
    "deepspeed": frozenset({"Trains", "Scores", "Values"}),
    "vllm": frozenset({"Generates", "Follows"}),
}
_SHARED = {"base", "registry", "attention", "decoding", "packing", "pretrained"}


def engine_names() -> list[str]:
    """All names that a recipe may use: the files of this folder, and what is planned only."""
    files = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    return sorted((files - _SHARED) | PLANNED_ONLY.keys())


def engine_capabilities(name: str) -> frozenset[str]:
    """``name`` must be one of ``engine_names()``."""
    return PLANNED_ONLY[name] if name in PLANNED_ONLY else capabilities_of(engine_class(name))


def engine_class(name: str) -> type[Engine]:
    """Raises EngineError for an engine that can be planned for and not started."""
    if name in PLANNED_ONLY:
        raise EngineError(f"engine '{name}' can be planned for, but this version of rlflow does not start it.")
    engine: type[Engine] = import_module(f"rlflow.engines.{name}").ENGINE
    return engine
