"""What a model says of each response token, by the head that it has.

Shapes: T response tokens of all rows in their order.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import HEADS, EngineSpec, Head
from rlflow.engines.causal_lm.packing import Spread, token_scores, token_values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def head_of(spec: EngineSpec) -> Head:
    """The one that the graph asks of the role."""
    return next((head for capability, head in HEADS.items() if capability in spec.capabilities), "vocabulary")


def outputs_of(
    model: "PreTrainedModel", head: Head, sequences: Sequences, temperature: float, spread: Spread | None = None
) -> "tuple[Tensor, dict[str, Tensor]]":
    """[T], float32: what a loss is a function of, and columns besides those of the minibatch.

    Logprobs, with their entropies; what a value head says before each token; or what a reward head says at it.
    """
    if head == "value":
        return token_values(model, sequences, spread), {}
    if head == "reward":
        return token_rewards(model, sequences, spread), {}
    scores = token_scores(model, sequences, temperature, spread)
    return scores.logprobs, {"entropy": scores.entropies}


def token_rewards(model: "PreTrainedModel", sequences: Sequences, spread: Spread | None = None) -> "Tensor":
    """[T], float32: what the head says at each response token, having read it. At the last one it is the reward."""
    import torch

    response, count = sequences.response_ids, len(sequences)
    # What is said before the token after it. Of one more token a row nothing is read but its place.
    values = np.insert(response.values, response.offsets[1:], 0)
    longer = Packed(values, response.offsets + np.arange(count + 1))
    before = Sequences(keys=sequences.keys, prompt_ids=sequences.prompt_ids, response_ids=longer)
    after = np.delete(np.arange(len(values)), longer.offsets[:-1])
    return token_values(model, before, spread)[torch.from_numpy(after).to(model.device)]


def last_of_each(values: Packed) -> NDArray[np.float32]:
    """[B]: of the last token of each response."""
    last: NDArray[np.float32] = values.values[values.offsets[1:] - 1]
    return last


def name_padding(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """In the configuration of a reward model, since transformers reads the reward at the last token that is no padding.

    Where the end token pads, none is named: the end token is where the reward is, and it would be passed over.
    """
    pad = tokenizer.pad_token_id
    model.config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
