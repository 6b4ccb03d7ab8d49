"""One pass of a model over packed sequences: numbers for each response token.

Shapes: T response tokens of all rows in their order, N tokens of the stream, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.packing import Index, Stream, pack
from rlflow.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


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

    from rlflow.engines.causal_lm.head import scoring_head

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
