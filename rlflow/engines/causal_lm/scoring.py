"""One pass of a model over packed sequences: a number for each response token.

Shapes: T response tokens of all rows in their order, N tokens of the stream, V vocabulary.
"""

from typing import TYPE_CHECKING

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.packing import pack

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def token_logprobs(model: "PreTrainedModel", sequences: Sequences, temperature: float) -> "Tensor":
    """[T], float32: the log-probability of each response token, logits divided by ``temperature``."""
    import torch
    from torch.nn.functional import cross_entropy

    inputs, predictors = _inputs(model, sequences)
    # Rollouts of one prompt have one predictor of their first token. Taking it once keeps gradients reproducible: those
    # of an index with repetitions are added up in any order.
    once, places = torch.unique(predictors, return_inverse=True)
    logits = model(**inputs, logits_to_keep=once).logits[0].float().index_select(0, places)
    targets = torch.from_numpy(sequences.response_ids.values).to(model.device, torch.int64)
    return -cross_entropy(logits / temperature if temperature != 1.0 else logits, targets, reduction="none")


def token_values(model: "PreTrainedModel", sequences: Sequences) -> "Tensor":
    """[T], float32: what the value head says before each response token."""
    inputs, predictors = _inputs(model, sequences)
    values: Tensor = model(**inputs).logits[0, :, 0].float().index_select(0, predictors)
    return values


def _inputs(model: "PreTrainedModel", sequences: Sequences) -> "tuple[dict[str, object], Tensor]":
    import torch

    from rlflow.engines.causal_lm.attention import PackedLayout

    stream = pack(sequences.prompt_ids, sequences.response_ids)
    ids, positions, predictors = (
        torch.from_numpy(x).to(model.device) for x in (stream.ids, stream.positions, stream.predictors)
    )
    layout = PackedLayout(stream, model.device)
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "layout": layout, "use_cache": False}
    return inputs, predictors
