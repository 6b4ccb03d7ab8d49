"""One forward pass over packed sequences, and what the model's head gives for each response token.

A language model gives logprobs and entropies, a value model gives values, and a reward model gives rewards.
Shapes: B rows (sequences), T response tokens of all rows in order, N tokens of the stream.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import Entropy, Head
from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.engines.causal_lm.packing import Index, pack
from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlflow.engines.sharded.ulysses import Ulysses


def compute_outputs(
    model: "PreTrainedModel",
    head: Head,
    sequences: Sequences,
    temperature: float,
    entropy: Entropy = "unused",
    sharding: "Ulysses | None" = None,
) -> "tuple[Tensor, dict[str, Tensor]]":
    """Return what a loss is a function of, [T], float32, and columns in addition to the minibatch's.

    These are logprobs and a column of entropies; the values before each token; or the rewards at each token.
    """
    if head == "value":
        return token_values(model, sequences, sharding), {}
    if head == "reward":
        return token_rewards(model, sequences, sharding), {}
    scores = token_scores(model, sequences, temperature, entropy, sharding)
    return scores[:, 0], {"entropy": scores[:, 1]}


def token_scores(
    model: "PreTrainedModel",
    sequences: Sequences,
    temperature: float,
    entropy: Entropy = "unused",
    sharding: "Ulysses | None" = None,
) -> "Tensor":
    """Return [T, 2], float32: the logprob of each response token, and the entropy of its distribution in nats.

    Logits are divided by ``temperature``. Entropies that are ``unused`` are zero.

    Raises EngineError for a model whose logits are not the output of a single linear layer.
    """
    from rlflow.engines.causal_lm.output_layer import scores_as_logits

    inputs, predictors, tokens = _model_inputs(model, sequences, sharding)
    # The rollouts of a prompt share the predictor of their first token. Selecting each predictor once keeps gradients
    # reproducible: gradients of an index with repetitions are added up in any order.
    unique, places = (to_device(x, model.device) for x in np.unique(predictors, return_inverse=True))
    ids = sequences.response_ids.values
    targets = to_device((ids if tokens is None else ids[tokens]).astype(np.int64), model.device)
    with scores_as_logits(model, places, targets, temperature, entropy) as computed:
        scores: Tensor = model(**inputs, logits_to_keep=unique).logits
    if scores.data_ptr() != computed[0].data_ptr():
        name = type(getattr(model, "module", model)).__name__
        raise EngineError(f"a {name} changes its logits after its output layer, which is not supported.")
    if sharding is None or tokens is None:
        return scores[0]
    return sharding.gather(scores[0], tokens, len(ids))


def token_values(model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None" = None) -> "Tensor":
    """Return [T], float32: the value head's output before each response token."""
    inputs, predictors, tokens = _model_inputs(model, sequences, sharding)
    # The rollouts of a prompt share the predictor of their first token. Unlike index_select, indexing adds up the
    # gradients of repeated entries in a fixed order, on GPUs too.
    values: Tensor = model(**inputs).logits[0, :, 0].float()[to_device(predictors, model.device)]
    if sharding is None or tokens is None:
        return values
    return sharding.gather(values, tokens, int(sequences.response_ids.offsets[-1]))


def token_rewards(model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None" = None) -> "Tensor":
    """Return [T], float32: the head's output at each response token, after reading it.

    At the last token of a response it is the reward.
    """
    response, count = sequences.response_ids, len(sequences)
    # The output at a token is the value before the token after it, so each row gets one more token, never read.
    values = np.insert(response.values, response.offsets[1:], 0)
    longer = Packed(values, response.offsets + np.arange(count + 1))
    extended = replace(sequences.as_sequences(), response_ids=longer)
    after = np.delete(np.arange(len(values)), longer.offsets[:-1])
    return token_values(model, extended, sharding)[to_device(after, model.device)]


def last_values(values: Packed) -> NDArray[np.float32]:
    """Return [B]: the value of each response's last token."""
    last: NDArray[np.float32] = values.values[values.offsets[1:] - 1]
    return last


def set_pad_token(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write the pad token into a reward model's configuration: transformers reads the reward at the last other token.

    Nothing is written where the end token is also the pad token: transformers would skip it, and the reward is there.
    """
    pad = tokenizer.pad_token_id
    model.config.pad_token_id = None if pad == tokenizer.eos_token_id else pad


def _model_inputs(
    model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None"
) -> "tuple[dict[str, object], Index, Index | None]":
    """Return the arguments of the forward pass, the predictors on this rank, and which tokens those predict."""
    from rlflow.engines.causal_lm.attention import PackedLayout

    stream, device, dtype = pack(sequences.prompt_ids, sequences.response_ids), model.device, model.dtype
    shard, tokens = (stream, None) if sharding is None else sharding.shard(stream)
    inputs: dict[str, object] = {
        "input_ids": to_device(shard.ids, device)[None],
        "position_ids": to_device(shard.positions, device)[None],
        "layout": PackedLayout(stream, device, dtype)
        if sharding is None
        else sharding.attention_layout(stream, device, dtype),
        "use_cache": False,
    }
    return inputs, shard.predictors, tokens
