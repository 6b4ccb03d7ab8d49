"""Many sequences through a model as one stream of tokens, without padding and without computing a prompt twice.

Shapes: N tokens of the stream, B rows (sequences), S slots of a block of rows, T response tokens of all rows.

One pass of a model over packed sequences: numbers for each response token.

Shapes: T response tokens of all rows in their order, N tokens of the stream, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences
from rlflow.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


Index = NDArray[np.int64]

# Rows share a block of attention when the shortest is at least this share of the longest.
_LIKE_LENGTH = 0.8


@dataclass(frozen=True, eq=False)
class Stream:
    """The inputs of one forward pass.

    The rollouts of one prompt stand next to each other and share its tokens: their slots point at the same place of
    the stream. The last token of a row is never an input, since nothing is predicted from it.
    """

    ids: Index
    """[N]"""
    positions: Index
    """[N]: of each token in its own sequence."""
    predictors: Index
    """[T]: where in the stream each response token is predicted, in the order of rows."""
    blocks: tuple[Index, ...]
    """[rows of the block, S] each: the place in the stream of each slot of a row, padded on the right."""
    owners: Index
    """[N]: for each token of the stream a slot that holds it, counted through all blocks laid end to end."""


def pack(prompt_ids: Packed, response_ids: Packed) -> Stream:
    """Rows of at least one prompt and one response token each; equal neighbouring prompts are shared."""
    ids: list[NDArray[np.int32]] = []
    positions: list[Index] = []
    rows: list[Index] = []
    predictors: list[Index] = []
    end = 0
    prompt: NDArray[np.int32] | None = None
    prompt_at = np.empty(0, np.int64)
    for row in range(len(prompt_ids)):
        if prompt is None or not np.array_equal(prompt, prompt_ids[row]):
            prompt = prompt_ids[row]
            prompt_at = np.arange(end, end + len(prompt))
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
            end += len(prompt)
        inputs = response_ids[row][:-1]
        inputs_at = np.arange(end, end + len(inputs))
        ids.append(inputs)
        positions.append(np.arange(len(prompt), len(prompt) + len(inputs)))
        end += len(inputs)
        rows.append(np.concatenate([prompt_at, inputs_at]))
        predictors.append(rows[-1][len(prompt) - 1 :])
    blocks = tuple(_blocks(rows))
    slots = np.concatenate([block.ravel() for block in blocks])
    owners = np.empty(end, np.int64)
    # Padding repeats a row's first token; written backwards, the first slot of a token wins over it.
    owners[slots[::-1]] = np.arange(len(slots))[::-1]
    return Stream(
        ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions),
        predictors=np.concatenate(predictors),
        blocks=blocks,
        owners=owners,
    )


def _blocks(rows: list[Index]) -> Iterator[Index]:
    """Rows of like length together, the longest first."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    while order:
        longest = len(rows[order[0]])
        count = sum(len(rows[row]) >= _LIKE_LENGTH * longest for row in order)
        block = np.empty((count, longest), np.int64)
        for line, row in zip(block, order[:count], strict=True):
            line[: len(rows[row])] = rows[row]
            line[len(rows[row]) :] = rows[row][0]
        yield block
        order = order[count:]


class Spread(Protocol):
    """Several ranks pass one stream through the model together, each a part of its tokens."""

    def part(self, stream: Stream) -> tuple[Stream, Index]:
        """This rank's part, whose predictors point into it, and which of the T response tokens these predict."""

    def layout(self, stream: Stream, device: "torch.device") -> Any:
        """Attention over the whole stream, called with a part of it."""

    def whole(self, values: "Tensor", tokens: Index, count: int) -> "Tensor":
        """[T, ...] from this rank's ``values`` for ``tokens``. Gradients flow to these; others have their own ranks."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    logprobs: "Tensor"
    """[T], float32: of each response token."""
    entropies: "Tensor"
    """[T], float32: of what the model would have written in its place, in nats."""


def token_scores(
    model: "PreTrainedModel", sequences: Sequences, temperature: float, spread: Spread | None = None
) -> TokenScores:
    """Of logits divided by ``temperature``. Raises EngineError for a model that does more than one linear layer to get
    them."""
    import torch

    from rlflow.engines.causal_lm.output_layer import scoring_head

    inputs, predictors, tokens = _inputs(model, sequences, spread)
    # Rollouts of one prompt have one predictor of their first token. Taking it once keeps gradients reproducible: those
    # of an index with repetitions are added up in any order.
    once, places = torch.unique(predictors, return_inverse=True)
    ids = sequences.response_ids.values
    targets = torch.from_numpy(ids if tokens is None else ids[tokens]).to(model.device, torch.int64)
    with scoring_head(model, places, targets, temperature) as made:
        scores = model(**inputs, logits_to_keep=once).logits
    if scores.data_ptr() != made[0].data_ptr():
        name = type(getattr(model, "module", model)).__name__
        raise EngineError(f"a {name} changes its logits after its output layer, which is not supported.")
    scores = scores[0] if spread is None or tokens is None else spread.whole(scores[0], tokens, len(ids))
    return TokenScores(scores[:, 0], scores[:, 1])


def token_values(model: "PreTrainedModel", sequences: Sequences, spread: Spread | None = None) -> "Tensor":
    """[T], float32: what the value head says before each response token."""
    inputs, predictors, tokens = _inputs(model, sequences, spread)
    # Rollouts of one prompt have one predictor of their first token. Unlike those of index_select, the gradients of an
    # index with repetitions are added up in one order on GPUs too.
    values: Tensor = model(**inputs).logits[0, :, 0].float()[predictors]
    if spread is None or tokens is None:
        return values
    return spread.whole(values, tokens, int(sequences.response_ids.offsets[-1]))


def _inputs(
    model: "PreTrainedModel", sequences: Sequences, spread: Spread | None
) -> "tuple[dict[str, object], Tensor, Index | None]":
    import torch

    from rlflow.engines.causal_lm.attention import PackedLayout

    stream = pack(sequences.prompt_ids, sequences.response_ids)
    part, tokens = (stream, None) if spread is None else spread.part(stream)
    ids, positions, predictors = (
        torch.from_numpy(x).to(model.device) for x in (part.ids, part.positions, part.predictors)
    )
    layout = PackedLayout(stream, model.device) if spread is None else spread.layout(stream, model.device)
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "layout": layout, "use_cache": False}
    return inputs, predictors, tokens
