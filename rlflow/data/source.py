"""Rows of a data set as the prompts, examples and pairs of each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Examples, Packed, Pairs, Prompts, Repeated, Rollouts
from rlflow.data.pairs import pairs_of
from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.plugins import load_object
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[Mapping[str, Any]]
T = TypeVar("T")

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

    def prompts(self, step: int) -> Prompts:
        """``batch_size`` prompts for ``step``, counted from 0; with ``ahead`` more in the first and fewer in the
        last."""
        first, end = self._first(step), self._first(step + 1)
        if self.ahead:
            end = min(end, self.steps * self.data.batch_size)
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
        return rollouts.mapped(
            lambda column: column if isinstance(column, Repeated) else Packed(column.values, column.offsets)
        )

    def examples(self, step: int) -> Examples:
        """``batch_size`` prompts with their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        rows = self._rows_at(np.arange(step * self.data.batch_size, (step + 1) * self.data.batch_size))
        return Examples(
            keys=_keys(step, len(rows)),
            prompt_ids=self.prompt_ids.take(rows),
            response_ids=self.response_ids.take(rows),
        )

    def pairs(self, step: int) -> Pairs:
        """``batch_size`` prompts with both of their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        assert self.rejected_ids is not None
        rows = self._rows_at(np.arange(step * self.data.batch_size, (step + 1) * self.data.batch_size))
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
        return step * self.data.batch_size + (self.ahead if step else 0)

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
    """The rows of that split, with the columns that the recipe names under their names here. Raises RecipeError."""
    split = getattr(data, field)
    rows = _made(data, split) if ":" in data.source else _read(data, field, split)
    if not rows:
        raise RecipeError(f"data.{field}", f"'{split}' of '{data.source}' has no rows", fix="another split or source")
    for name, column in data.columns.items():
        if column not in rows[0]:
            raise _no_column(data, f"data.columns.{name}", column, rows[0])
        rows = [{**row, name: row.get(column)} for row in rows]
    return rows


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
) -> DataSource:
    """Encodes all rows. Raises RecipeError."""
    if with_pairs:
        prompt_ids, chosen, rejected = _encode_pairs(data, tokenizer, rows)
        apart = pairs_of(_keys(0, len(held_out)), *_encode_pairs(data, tokenizer, held_out))
        return DataSource(data, seed, rows, prompt_ids, chosen, apart, rejected)
    prompt_ids = _encode_prompts(data, tokenizer, rows)
    responses = _encode_responses(data, tokenizer, rows, "response") if with_responses else None
    prompts = held_out_prompts(data, tokenizer, held_out)
    return DataSource(data, seed, rows, prompt_ids, responses, prompts, ahead=ahead, steps=steps)


def held_out_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> Prompts:
    """All of ``rows``. Raises RecipeError."""
    ids = _encode_prompts(data, tokenizer, rows) if rows else Packed.from_rows([], np.int32)
    return Prompts(keys=_keys(0, len(rows)), ids=ids, rows=tuple(rows))


def _encode_pairs(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> tuple[Packed, Packed, Packed]:
    """Prompts, chosen and rejected responses."""
    if not rows:
        none = Packed.from_rows([], np.int32)
        return none, none, none
    chosen, rejected = (_encode_responses(data, tokenizer, rows, name) for name in ("chosen", "rejected"))
    return _encode_prompts(data, tokenizer, rows), chosen, rejected


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
    return list(loaded)


def _no_column(data: Data, path: str, column: str, row: Mapping[str, Any]) -> RecipeError:
    fix = did_you_mean(column, row) or f"name the right one: {path}=COLUMN"
    return RecipeError(path, f"no column '{column}' in '{data.source}'", known=sorted(row), fix=fix)


def _column(data: Data, rows: Rows, name: str) -> list[Any]:
    if name not in rows[0]:
        raise _no_column(data, f"data.columns.{name}", name, rows[0])
    values = [row.get(name) for row in rows]
    if None in values:
        raise RecipeError(
            "data.source", f"row {values.index(None)} of '{data.source}' has no '{name}'", fix="leave it out"
        )
    return values


def _encode_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> Packed:
    column = _column(data, rows, "prompt")
    if tokenizer.chat_template:
        texts = _guarded(data, lambda: [_chat(data, tokenizer, prompt) for prompt in column])
        encoded = _guarded(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    elif any(not isinstance(prompt, str) for prompt in column):
        raise RecipeError(
            "data.columns.prompt",
            "prompts are not texts, and the tokenizer has no chat template",
            fix="a column of texts",
        )
    else:
        encoded = _guarded(data, lambda: tokenizer(column)["input_ids"])
    packed = Packed.from_rows(encoded, np.int32)
    longest = int(packed.lengths.argmax())
    if (length := packed.lengths[longest]) > data.max_prompt_tokens:
        raise RecipeError(
            "data.max_prompt_tokens",
            f"the prompt of row {longest} of '{data.source}' has {length} tokens, not {data.max_prompt_tokens} at most",
            fix=f"data.max_prompt_tokens={length}, or leave such rows out",
        )
    if (empty := np.flatnonzero(packed.lengths == 0)).size:
        raise RecipeError(
            "data.source", f"the prompt of row {empty[0]} of '{data.source}' is empty", fix="leave it out"
        )
    return packed


def _encode_responses(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, name: str) -> Packed:
    """Each with the end token."""
    if (end := tokenizer.eos_token_id) is None:
        raise RecipeError("models", "the tokenizer has no end token, which responses are to learn", fix="set one")
    texts = [_last_message(response) for response in _column(data, rows, name)]
    encoded = _guarded(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    return Packed.from_rows([[*ids, end] for ids in encoded], np.int32)


def _last_message(response: Any) -> str:
    """The text, or that of the last message where a response is written as the conversation that it ends."""
    if isinstance(response, list) and response and isinstance(response[-1], Mapping) and "content" in response[-1]:
        response = response[-1]["content"]
    return str(response)


def _chat(data: Data, tokenizer: "PreTrainedTokenizerBase", prompt: Any) -> str:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    messages = prompt if isinstance(prompt, list) else [*system, {"role": "user", "content": str(prompt)}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _guarded(data: Data, encode: Callable[[], T]) -> T:
    """What a tokenizer or a chat template refuses is the data's or the recipe's to mend."""
    try:
        return encode()
    except Exception as error:  # templates and tokenizers have no base of their own
        raise RecipeError(
            "data.source",
            f"the tokenizer refuses a text of '{data.source}' ({first_line(error)})",
            fix="leave such rows out, or data.system_prompt=null for a template that knows no system",
        ) from None
