"""Rows of a data set as the prompts, examples and pairs of each step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Examples, Packed, Pairs, Prompts, Repeated, Rollouts
from rlflow.data.encoding import Rows, encode, no_column, pairs_of, split_answers
from rlflow.errors import RecipeError, first_line
from rlflow.plugins import load_object
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, eq=False)
class DataSource:
    """The training rows, in an order drawn anew for every epoch from the seed. It keeps no position."""

    data: Data
    seed: int
    rows: Rows
    prompt_ids: Packed
    response_ids: Packed | None
    """Of the rows, where they are to be imitated or are preferred to others."""
    held_out: Prompts | Pairs
    rejected_ids: Packed | None = None
    """Of the rows, where there are pairs."""
    ahead: int = 0
    """Prompts that are given before the step that they would be given for."""
    steps: int = 0
    """Of the whole run, where prompts are given ahead: none are given of which there is no step."""
    warnings: tuple[str, ...] = ()
    """How many prompts were too long, and what became of them."""
    behind: tuple[int, int] = (0, 0)
    """A step, and the rows taken before it: their number need not follow from a ``batch_size`` that was changed."""

    def prompts(self, step: int) -> Prompts:
        """``batch_size`` prompts for ``step``, counted from 0; with ``ahead`` more in the first and fewer in the
        last."""
        first, end = self._first(step), self._first(step + 1)
        if self.ahead:
            end = min(end, self._place(self.steps))
        return self._prompts_at(_keys(step, end - first), np.arange(first, end))

    def prompts_from(self, place: int, step: int, first: int, count: int) -> Prompts:
        """``count`` prompts from ``place`` on among those of the run, numbered from ``first`` on in ``step``."""
        keys = _keys(step, count)
        keys[:, 1] += first
        return self._prompts_at(keys, np.arange(place, place + count))

    def prompts_of(self, keys: NDArray[np.int64]) -> Prompts:
        """Those that ``prompts`` gave with these keys, [P, 3]."""
        return self._prompts_at(keys, np.array([self._first(step) for step in keys[:, 0].tolist()]) + keys[:, 1])

    def copied(self, rollouts: Rollouts) -> Rollouts:
        """The same, apart from whoever made them: where this lives in a process of its own, it has them from now on."""
        return rollouts.map_packed(
            lambda column: column if isinstance(column, Repeated) else Packed(column.values, column.offsets)
        )

    def examples(self, step: int) -> Examples:
        """``batch_size`` prompts with their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        rows = self._rows_at(np.arange(self._place(step), self._place(step + 1)))
        return Examples(
            keys=_keys(step, len(rows)),
            prompt_ids=self.prompt_ids.take(rows),
            response_ids=self.response_ids.take(rows),
        )

    def pairs(self, step: int) -> Pairs:
        """``batch_size`` prompts with both of their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        assert self.rejected_ids is not None
        rows = self._rows_at(np.arange(self._place(step), self._place(step + 1)))
        columns = [ids.take(rows) for ids in (self.prompt_ids, self.response_ids, self.rejected_ids)]
        return pairs_of(_keys(step, len(rows)), *columns)

    def held_out_prompts(self) -> Prompts:
        """All rows that are held out, in their order."""
        assert isinstance(self.held_out, Prompts)
        return self.held_out

    def held_out_pairs(self) -> Pairs:
        """Likewise, where they are pairs."""
        assert isinstance(self.held_out, Pairs)
        return self.held_out

    def _first(self, step: int) -> int:
        """The place of the step's first prompt among those of the run."""
        return self._place(step) + (self.ahead if step else 0)

    def _place(self, step: int) -> int:
        """Return the number of rows that the steps before ``step`` take, without those that are given ahead."""
        known, rows = self.behind
        return rows + (step - known) * self.data.batch_size

    def _prompts_at(self, keys: NDArray[np.int64], places: NDArray[np.int64]) -> Prompts:
        rows = self._rows_at(places)
        return Prompts(keys=keys, ids=self.prompt_ids.take(rows), rows=tuple(self.rows[int(row)] for row in rows))

    def _rows_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs = places // len(self.rows)
        orders = {
            epoch: np.random.default_rng([self.seed, int(epoch)]).permutation(len(self.rows)) for epoch in set(epochs)
        }
        return np.array([orders[epoch][place % len(self.rows)] for epoch, place in zip(epochs, places, strict=True)])


def load_rows(data: Data, field: Literal["split", "eval_split"]) -> Rows:
    """Return the rows of that split, with the columns under the names that the recipe gives them, and with the answer
    split off prompts that are whole conversations. Raises RecipeError."""
    split = getattr(data, field)
    rows = _made(data, split) if ":" in data.source else _read(data, field, split)
    if not rows:
        raise RecipeError(f"data.{field}", f"'{split}' of '{data.source}' has no rows", fix="another split or source")
    for name, column in data.columns.items():
        if column not in rows[0]:
            raise no_column(data, f"data.columns.{name}", column, rows[0])
        rows = [{**row, name: row.get(column)} for row in rows]
    return split_answers(rows)


def open_training_data(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    seed: int,
    *,
    with_responses: bool,
    with_pairs: bool = False,
    held_out: Rows = (),
    ahead: int = 0,
    steps: int = 0,
    behind: tuple[int, int] = (0, 0),
) -> DataSource:
    """Encode all rows. Raises RecipeError."""
    names = ("chosen", "rejected") if with_pairs else ("response",) if with_responses else ()
    train = encode(data, tokenizer, rows, "split", names)
    apart = encode(data, tokenizer, held_out, "eval_split", names if with_pairs else ())
    keys = _keys(0, len(apart.rows))
    prompts = Prompts(keys=keys, ids=apart.prompt_ids, rows=tuple(apart.rows))
    return DataSource(
        data,
        seed,
        train.rows,
        train.prompt_ids,
        train.responses[0] if names else None,
        pairs_of(keys, apart.prompt_ids, *apart.responses) if with_pairs else prompts,
        train.responses[1] if with_pairs else None,
        ahead=ahead,
        steps=steps,
        behind=behind,
        warnings=(*train.warnings, *apart.warnings),
    )


def _keys(step: int, count: int) -> NDArray[np.int64]:
    return np.stack([np.full(count, step), np.arange(count), np.zeros(count, np.int64)], axis=1)


def _made(data: Data, split: str) -> Rows:
    function = load_object(data.source, "data.source")
    try:
        return list(function(split=split, **data.options))
    except Exception as error:  # whatever the user's own function raises
        raise RecipeError(
            "data.source", f"'{data.source}' failed ({first_line(error)})", fix="see data.options"
        ) from error


def _read(data: Data, field: str, split: str) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    path = Path(data.source).expanduser()
    local = path.exists() or path.suffix in _FORMATS or data.source.startswith((".", "/", "~"))
    if local and not path.exists():
        raise RecipeError("data.source", f"'{data.source}' does not exist", fix=f"it is looked for from {Path.cwd()}")
    try:
        if path.is_file():
            if path.suffix not in _FORMATS:
                raise RecipeError("data.source", f"'{path.suffix}' is not read", known=_FORMATS)
            loaded = datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), split=split)
        else:
            loaded = datasets.load_dataset(str(path) if local else data.source, data.name, split=split)
    except RecipeError:
        raise
    except Exception as error:  # the library lets errors of many others through
        raise RecipeError(
            f"data.{field}",
            f"'{split}' of '{data.source}' cannot be read ({first_line(error)})",
            fix="a single file has the split 'train' alone, of which 'train[:90%]' is a part",
        ) from None
    return _decoded(data, loaded)


def _decoded(data: Data, loaded: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the rows. Raises RecipeError for one with bytes that are not UTF-8."""
    rows: list[Mapping[str, Any]] = []
    try:
        rows.extend(loaded)
    except UnicodeDecodeError as error:
        raise RecipeError(
            "data.source",
            f"row {len(rows)} of '{data.source}' is not UTF-8 (byte 0x{error.object[error.start]:02x})",
            fix="save the file as UTF-8",
        ) from None
    return rows
