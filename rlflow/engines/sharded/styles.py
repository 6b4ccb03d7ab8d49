"""Plans of transformers: which modules of a model ranks divide among them, and in which style."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from rlflow.errors import EngineError


def styled_modules(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the module and the style of each module that a plan names."""
    for name, module in list(model.named_modules()):
        # A plan has one entry for all layers.
        if style := plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)):
            yield name, module, style


def refuse(model: Any, way: str, fact: str) -> NoReturn:
    """Raise EngineError for a model that cannot be parallel in this way."""
    raise EngineError(f"{type(model).__name__} cannot be {way}-parallel: {fact}.")
