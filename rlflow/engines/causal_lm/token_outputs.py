"""One forward pass over packed sequences, and what the model's head gives for each response token.

A language model gives logprobs and entropies, a value model gives values, and a reward model gives rewards.
Shapes: B rows (sequences), T response tokens of all rows in order, N tokens of the stream.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import Entropy
from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.engines.causal_lm.packing import Index, Stream, pack
from rlflow.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlflow.engines.causal_lm.routing import Routers
    from rlflow.engines.sharded.ulysses import Ulysses
    from rlflow.engines.vision.base import Pixels
    from rlflow.engines.vision.passes import Vision


@dataclass(frozen=True, eq=False)
class Extras:
    """The scores that a pass of a language model computes besides the logprobs of response tokens."""

    entropy: Entropy = "unused"
    words: NDArray[np.int32] | None = None
    """[T, K]: further words that are scored in the place of each response token."""
    top: int = 0
    """The number of likeliest words that are found in place of all scores."""


NO_EXTRAS = Extras()


def token_scores(
    model: "PreTrainedModel",
    sequences: Sequences,
    temperature: float,
    extras: Extras = NO_EXTRAS,
    sharding: "Ulysses | None" = None,
    vision: "Vision | None" = None,
    routers: "Routers | None" = None,
) -> "Tensor":
    """Return [T, 2 + K], float32: the logprob of each response token, the entropy of its distribution, and ``extras``.

    These are the logprobs of K words; with ``extras.top``, the result is [T, 2 K]: words and their logprobs. Logits are
    divided by ``temperature``. Entropies that are ``unused`` are zero, others in nats. With ``routers`` the model uses
    the experts that the sequences have in their routing.

    Raises EngineError for a model whose logits are not the output of a single linear layer, and for images that the
    model cannot see.
    """
    from rlflow.engines.causal_lm.output_layer import scores_as_logits

    passed = _prepare_pass(model, sequences, sharding, vision)
    tokens = passed.tokens
    if routers is not None:
        routers.replay(None if sequences.routing is None else sequences.routing.values, passed.routing, model.device)
    # The rollouts of a prompt share the predictor of their first token. Selecting each predictor once keeps gradients
    # reproducible: gradients of an index with repetitions are added up in any order.
    unique, places = (to_device(x, model.device) for x in np.unique(passed.predictors, return_inverse=True))
    ids = sequences.response_ids.values
    words = ids if extras.words is None else np.column_stack([ids, extras.words])
    targets = to_device((words if tokens is None else words[tokens]).astype(np.int64), model.device)
    with scores_as_logits(model, places, targets, temperature, extras.entropy, extras.top) as computed:
        scores: Tensor = model(**passed.inputs, logits_to_keep=unique).logits
    if scores.data_ptr() != computed[0].data_ptr():
        name = type(getattr(model, "module", model)).__name__
        raise EngineError(f"a {name} changes its logits after its output layer, which is not supported.")
    if passed.anchor is not None:
        scores = scores + passed.anchor
    if sharding is None or tokens is None:
        return scores[0]
    return sharding.gather(scores[0], tokens, len(ids))


def token_values(model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None" = None) -> "Tensor":
    """Return [T], float32: the value head's output before each response token."""
    passed = _prepare_pass(model, sequences, sharding)
    # The rollouts of a prompt share the predictor of their first token. Unlike index_select, indexing adds up the
    # gradients of repeated entries in a fixed order, on GPUs too.
    values: Tensor = model(**passed.inputs).logits[0, :, 0].float()[to_device(passed.predictors, model.device)]
    if sharding is None or passed.tokens is None:
        return values
    return sharding.gather(values, passed.tokens, int(sequences.response_ids.offsets[-1]))


def token_rewards(model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None" = None) -> "Tensor":
    """Return [T], float32: the head's output at each response token, after reading it.

    At the last token of a response it is the reward.
    """
    response, count = sequences.response_ids, len(sequences)
    # The output at a token is the value before the token after it, so each row gets one more token, never read.
    values = np.insert(response.values, response.offsets[1:], 0)
    longer = Packed(values, response.offsets + np.arange(count + 1))
    extended = replace(sequences.as_sequences(), response_ids=longer, routing=None)
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


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass on this rank."""

    inputs: dict[str, Any]
    """The arguments of the model."""
    predictors: Index
    """The places on this rank from which response tokens are predicted."""
    tokens: Index | None
    """The numbers of the response tokens that these predict; None for all."""
    routing: Index | None
    """The places of the records of this rank's tokens, as in a stream."""
    anchor: "Tensor | None" = None
    """Zero, to be added to the outputs: see ``EncodedImages``."""


def _prepare_pass(
    model: "PreTrainedModel", sequences: Sequences, sharding: "Ulysses | None", vision: "Vision | None" = None
) -> _Pass:
    from rlflow.engines.causal_lm.attention import PackedLayout

    device, dtype = model.device, model.dtype
    stream = pack(sequences.prompt_ids, sequences.response_ids, sequences.images, sequences.routing)
    stream, pixels = place_images(stream, sequences.images, vision)
    shard, tokens = (stream, None) if sharding is None else sharding.shard(stream)
    inputs: dict[str, Any] = {
        "input_ids": to_device(shard.ids, device)[None],
        "position_ids": rotary_positions(shard, device),
        "layout": PackedLayout(stream, device, dtype)
        if sharding is None
        else sharding.attention_layout(stream, device, dtype),
        "use_cache": False,
    }
    if vision is None:
        return _Pass(inputs, shard.predictors, tokens, shard.routing)
    encoded = vision.encode(model, stream, shard, pixels)
    return _Pass({**inputs, **encoded.inputs}, shard.predictors, tokens, shard.routing, encoded.anchor)


def place_images(stream: Stream, images: Packed | None, vision: "Vision | None") -> "tuple[Stream, list[Pixels]]":
    """Return the stream with the places of its images, and their pixels. ``images`` are those of the packed rows.

    Raises EngineError for images that the model cannot see.
    """
    if vision is not None:
        return vision.place(stream, images)
    if images is not None:
        raise EngineError("the batch has images, which this model cannot see.")
    return stream, []


def rotary_positions(stream: Stream, device: "torch.device") -> "Tensor":
    """Return the positions of a stream as models take them: [1, N], or [3, 1, N] for images in two dimensions."""
    return to_device(stream.positions, device)[None] if stream.rope is None else to_device(stream.rope, device)[:, None]
