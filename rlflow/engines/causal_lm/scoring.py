"""One pass of a model over packed sequences: a number for each response token.

Shapes: T response tokens of all rows in their order, N tokens of the stream, V vocabulary.
"""

from typing import TYPE_CHECKING, Any, Protocol

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.packing import Index, Stream, pack

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
        """[T] from this rank's ``values`` for ``tokens``. Gradients flow to these; the others have their own ranks."""


def token_logprobs(
    model: "PreTrainedModel", sequences: Sequences, temperature: float, spread: Spread | None = None
) -> "Tensor":
    """[T], float32: the log-probability of each response token, logits divided by ``temperature``."""
    import torch
    from torch.nn.functional import cross_entropy

    inputs, predictors, tokens = _inputs(model, sequences, spread)
    # Rollouts of one prompt have one predictor of their first token. Taking it once keeps gradients reproducible: those
    # of an index with repetitions are added up in any order.
    once, places = torch.unique(predictors, return_inverse=True)
    logits = model(**inputs, logits_to_keep=once).logits[0].float().index_select(0, places)
    ids = sequences.response_ids.values
    targets = torch.from_numpy(ids if tokens is None else ids[tokens]).to(model.device, torch.int64)
    values = -cross_entropy(logits / temperature if temperature != 1.0 else logits, targets, reduction="none")
    return values if spread is None or tokens is None else spread.whole(values, tokens, len(ids))


def token_values(model: "PreTrainedModel", sequences: Sequences, spread: Spread | None = None) -> "Tensor":
    """[T], float32: what the value head says before each response token."""
    inputs, predictors, tokens = _inputs(model, sequences, spread)
    values: Tensor = model(**inputs).logits[0, :, 0].float().index_select(0, predictors)
    return (
        values if spread is None or tokens is None else spread.whole(values, tokens, len(sequences.response_ids.values))
    )


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
