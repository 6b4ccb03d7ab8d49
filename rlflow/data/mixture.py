"""A mixture of data sets with weights, as the rows of one: ``data.source: rlflow.data.mixture:mix``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError, below
from rlflow.recipe import Data
from rlflow.schema import Section, Text, parse


@dataclass(frozen=True, kw_only=True)
class MixturePart(Section):
    """A data set of a mixture, with the keys of ``data``."""

    source: Text
    weight: Annotated[float, Ge(0), Le(1e6)] = 1.0
    name: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    """The data set's name for a split of the mixture, where it differs: ``{train: train_sft}``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)


def mix(
    split: str, parts: Mapping[str, Mapping[str, Any]], rows: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Return rows of several data sets, in proportion to their weights, with the name of theirs as ``source``.

    There are ``rows`` rows, by default as many as in all parts. A part that has more is cut after a shuffle, and one
    that has fewer begins again. Raises RecipeError, its path counted from the recipe.
    """
    with below("data.options.parts"):
        known = {name: parse(MixturePart, part, name) for name, part in parts.items()}
    total = sum(part.weight for part in known.values())
    if not total:
        raise RecipeError("data.options.parts", "no part has a weight", fix="weight: 1 for a part")
    loaded = {}
    for name, part in known.items():
        data = Data(
            source=part.source,
            name=part.name,
            split=part.splits.get(split, split),
            options=part.options,
            columns=part.columns,
            batch_size=1,
            max_prompt_tokens=1,
        )
        try:
            loaded[name] = load_rows(data, "split")
        except RecipeError as error:
            error.path = f"data.options.parts.{name}.{error.path.removeprefix('data.')}"
            raise
    count = rows or sum(map(len, loaded.values()))
    mixed: list[dict[str, Any]] = []
    for name, part_rows in loaded.items():
        draw = np.random.default_rng([seed, *name.encode()])
        needed = round(count * known[name].weight / total)
        rounds = [draw.permutation(len(part_rows)) for _ in range(-(-needed // len(part_rows)))]
        order = np.concatenate(rounds)[:needed] if rounds else ()
        mixed += [{**part_rows[row], "source": name} for row in order]
    # Evaluations read the first rows.
    return [mixed[row] for row in np.random.default_rng(seed).permutation(len(mixed))]
