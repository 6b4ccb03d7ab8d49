"""Steps that a run skips because their values are not finite, and their batches in the run's folder.

A batch holds what was on the edges of the graph when the step ended: the inputs of the nodes that had not run, and the
output or the inputs of the node that failed. Rows of the data set are left out, and ``rlflow replay`` needs none. Of
images, only the digests are saved: ``rlflow replay`` reads the images in the data set again.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Batch, Examples, Packed, Pairs, Prompts, image_digests, pack_images
from rlflow.batch.files import read_fields, write_fields
from rlflow.compiler.graph import Graph
from rlflow.compiler.plan import Plan
from rlflow.data.images import ImageSource
from rlflow.errors import EngineError, NotFiniteError, RecipeError
from rlflow.runtime.protocols import Engines, Observer
from rlflow.system.atomic_folder import remove_folder, write_folder

_SOURCES: Mapping[str, type] = {"prompts": Prompts, "examples": Examples, "pairs": Pairs}
_REASON = "reason.json"
_NAME = re.compile(r"step-(\d{6,})")
# The number of newest batches that stay in the folder.
_KEPT = 5


class SkippedSteps:
    """The skipped steps of a run. Too many in a row end it."""

    def __init__(
        self, plan: Plan, directory: Path, engines: Engines, observer: Observer, steps: Sequence[int] = ()
    ) -> None:
        """Take the run's ``plan`` with its whole graph, and the ``steps`` that it has skipped so far."""
        self.steps = tuple(steps)
        """The skipped steps, counted from 1."""
        self._limit = plan.recipe.stop_after_skipped_steps
        self._kinds = _output_types(plan.graph)
        self._directory, self._engines, self._observer = directory, engines, observer
        self._writer = BatchWriter()

    @property
    def count(self) -> int:
        """Return the number of skipped steps."""
        return len(self.steps)

    def add(self, step: int, error: NotFiniteError, edges: Mapping[str, Any]) -> None:
        """Save the batch of a step, and report why it is skipped. Raises EngineError for too many in a row."""
        self.steps += (step,)
        folder = self._directory / "skipped" / f"step-{step:06d}"
        self._save(folder, error, edges)
        in_a_row = next(n for n in range(1, step + 1) if step - n not in self.steps)
        if in_a_row >= self._limit:
            which = f"the last {in_a_row} steps were" if in_a_row > 1 else "the step was"
            raise EngineError(
                f"{error} The run ends because {which} skipped (stop_after_skipped_steps).\n"
                f"  Fix: 'rlflow replay {self._directory}' shows where the values are not finite; "
                "resume=true continues from the last checkpoint, for example with a lower learning rate."
            )
        self._observer.warned(f"step {step} is skipped: {error} Its batch is in {folder}")

    def _save(self, folder: Path, error: NotFiniteError, edges: Mapping[str, Any]) -> None:
        writer = self._engines.place_with_tokens(self._writer)

        def write(temporary: Path) -> None:
            for name, batch in edges.items():
                if isinstance(batch, Batch) and (kind := self._kinds.get(name)) is not None:
                    writer.write(str(temporary.absolute() / f"{name}.npz"), batch, _saved_fields(kind))
            (temporary / _REASON).write_text(json.dumps({"node": error.node, "reason": str(error)}, indent=1))

        write_folder(folder, write, replaces=True)
        for old in skipped_folders(self._directory)[:-_KEPT]:
            remove_folder(old)


class BatchWriter:
    """Writes batches to files, in a process that can read their columns."""

    def write(self, file: str, batch: Batch, names: Sequence[str]) -> None:
        """Write these fields of a batch to ``file``, unless one of them is neither an array nor JSON."""
        values = {name: getattr(batch, name) for name in names}
        if values.get("images") is not None:
            values["images"] = image_digests(values["images"])
        try:
            write_fields(Path(file), {**values, **({"texts": list(values["texts"])} if "texts" in values else {})})
        except TypeError:
            Path(file).unlink(missing_ok=True)


@dataclass(frozen=True)
class SkippedStep:
    """A skipped step of a run, read from its folder."""

    step: int
    node: str
    """The node whose values were not finite."""
    reason: str
    edges: Mapping[str, Batch]
    """The outputs of nodes and the data, by name."""


def skipped_folders(directory: Path) -> list[Path]:
    """Return the folders of skipped steps in the folder of a run, the oldest first."""
    return sorted(folder for folder in (directory / "skipped").glob("step-*") if _NAME.fullmatch(folder.name))


def read_skipped(
    folder: Path, graph: Graph, load_images: Callable[[], Mapping[str, ImageSource]] = dict
) -> SkippedStep:
    """Return the skipped step in ``folder``, of a run with this ``graph``. Rows of the data set are empty.

    ``load_images`` returns the images of the data set, by digest. Raises RecipeError if one is missing.
    """
    known_images = cache(load_images)
    reason = json.loads((folder / _REASON).read_text())
    kinds = _output_types(graph)
    files = {file.stem: file for file in sorted(folder.glob("*.npz"))}
    edges = {name: _read(file, kinds[name], known_images) for name, file in files.items() if name in kinds}
    return SkippedStep(int(folder.name.removeprefix("step-")), reason["node"], reason["reason"], edges)


def _read(file: Path, kind: type, known_images: Callable[[], Mapping[str, ImageSource]]) -> Batch:
    values = read_fields(file)
    if values.get("images") is not None:
        values["images"] = _images(list(map(tuple, values["images"])), known_images())
    count = len(values[fields(kind)[0].name])
    empty = {
        "rows": tuple({} for _ in range(count)),
        "unfinished": Packed.from_rows([()] * count, np.uint8),
    }
    missing = {field.name for field in fields(kind)} - values.keys()
    batch: Batch = kind(**values, **{name: empty[name] for name in missing & empty.keys()})
    return batch


def _images(digests: Sequence[tuple[str, ...]], known: Mapping[str, ImageSource]) -> Packed:
    """Return the images of each row. Rows with the same ones share them."""
    numbers = {row: number for number, row in enumerate(dict.fromkeys(digests))}
    if missing := [digest for row in numbers for digest in row if digest not in known]:
        fact = f"the data has {len(missing)} images of the step no more ({missing[0]})"
        raise RecipeError("data.source", fact, fix="restore the rows and images of the run")
    images = pack_images([[known[digest].read() for digest in row] for row in numbers])
    return images.take(np.array([numbers[row] for row in digests], np.int64))


def _saved_fields(kind: type) -> list[str]:
    """Return the fields of a batch that are saved: not rows of the data, and not what an engine needs to resume."""
    return [field.name for field in fields(kind) if field.name not in ("rows", "unfinished")]


def _output_types(graph: Graph) -> Mapping[str, type]:
    """Return the types of the batches on all edges of a plan's graph."""
    return {**_SOURCES, **{node.name: node.operation.output() for node in graph.nodes}}
