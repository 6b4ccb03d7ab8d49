"""Rows of a data set as the prompts and examples of each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Examples, Packed, Prompts
from rlflow.errors import RecipeError, did_you_mean
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
    rows: Sequence[Mapping[str, Any]]
    prompt_ids: Packed
    response_ids: Packed | None

    def prompts(self, step: int) -> Prompts:
        """``batch_size`` prompts for ``step``, counted from 0."""
        rows = self._rows_of(step)
        return Prompts(
            keys=_keys(step, len(rows)), ids=self.prompt_ids.take(rows), rows=tuple(self.rows[int(row)] for row in rows)
        )

    def examples(self, step: int) -> Examples:
        """``batch_size`` prompts with their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        rows = self._rows_of(step)
        return Examples(
            keys=_keys(step, len(rows)),
            prompt_ids=self.prompt_ids.take(rows),
            response_ids=self.response_ids.take(rows),
        )

    def _rows_of(self, step: int) -> NDArray[np.int64]:
        places = np.arange(step * self.data.batch_size, (step + 1) * self.data.batch_size)
        epochs = places // len(self.rows)
        orders = {
            epoch: np.random.default_rng([self.seed, int(epoch)]).permutation(len(self.rows)) for epoch in set(epochs)
        }
        return np.array([orders[epoch][place % len(self.rows)] for epoch, place in zip(epochs, places, strict=True)])


def open_training_data(
    data: Data, tokenizer: "PreTrainedTokenizerBase", seed: int, *, with_responses: bool
) -> DataSource:
    """Reads and encodes all training rows. Raises RecipeError."""
    rows = _load(data, "split", data.split)
    prompt_ids = _encode_prompts(data, tokenizer, rows, "split")
    response_ids = None
    if with_responses:
        texts = [str(text) for text in _column(data, rows, "response")]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        response_ids = Packed.from_rows([[*ids, tokenizer.eos_token_id] for ids in encoded], np.int32)
    return DataSource(data, seed, rows, prompt_ids, response_ids)


def held_out_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase", num_prompts: int) -> Prompts:
    """The first ``num_prompts`` rows of ``eval_split``. Raises RecipeError."""
    if data.eval_split is None:
        raise RecipeError("data.eval_split", "is missing, and evaluation needs it", fix="name a split that is held out")
    rows = _load(data, "eval_split", data.eval_split)[:num_prompts]
    return Prompts(keys=_keys(0, len(rows)), ids=_encode_prompts(data, tokenizer, rows, "eval_split"), rows=tuple(rows))


def _keys(step: int, count: int) -> NDArray[np.int64]:
    return np.stack([np.full(count, step), np.arange(count), np.zeros(count, np.int64)], axis=1)


def _load(data: Data, field: str, split: str) -> list[dict[str, Any]]:
    rows = _made(data, split) if ":" in data.source else _read(data, field, split)
    if not rows:
        raise RecipeError(f"data.{field}", f"'{split}' of '{data.source}' has no rows")
    return rows


def _made(data: Data, split: str) -> list[dict[str, Any]]:
    function = load_object(data.source, "data.source")
    try:
        return list(function(split=split, **data.options))
    except Exception as error:  # whatever the user's own function raises
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise RecipeError("data.source", f"'{data.source}' failed ({reason})") from error


def _read(data: Data, field: str, split: str) -> list[dict[str, Any]]:
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
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(". :")
        raise RecipeError(f"data.{field}", f"'{split}' of '{data.source}' cannot be read ({reason})") from None
    return list(loaded)


def _column(data: Data, rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    column = data.columns.get(name, name)  # type: ignore[call-overload]
    if column not in rows[0]:
        known = sorted(rows[0])
        raise RecipeError(
            f"data.columns.{name}",
            f"no column '{column}' in '{data.source}'",
            known=known,
            fix=did_you_mean(column, known),
        )
    return [row[column] for row in rows]


def _encode_prompts(
    data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Mapping[str, Any]], field: str
) -> Packed:
    column = _column(data, rows, "prompt")
    if tokenizer.chat_template:
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        texts = [
            tokenizer.apply_chat_template(
                prompt if isinstance(prompt, list) else [*system, {"role": "user", "content": str(prompt)}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in column
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        encoded = tokenizer([str(prompt) for prompt in column])["input_ids"]
    packed = Packed.from_rows(encoded, np.int32)
    if (longest := int(packed.lengths.argmax())) >= 0 and packed.lengths[longest] > data.max_prompt_tokens:
        raise RecipeError(
            "data.max_prompt_tokens",
            f"row {longest} of '{data.source}' ({field}) has {packed.lengths[longest]} prompt tokens, "
            f"the limit is {data.max_prompt_tokens}",
            fix=f"data.max_prompt_tokens={packed.lengths[longest]}, or leave such rows out",
        )
    if (empty := np.flatnonzero(packed.lengths == 0)).size:
        raise RecipeError(f"data.{field}", f"the prompt of row {empty[0]} is empty")
    return packed
