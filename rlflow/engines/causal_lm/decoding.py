"""Generation token by token: a prompt is read once for its whole group, and finished sequences leave the batch.

Shapes: P prompts, G group size, B sequences (P x G), V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts
from rlflow.batch.routing import Routing
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.packing import Stream, pack
from rlflow.engines.causal_lm.token_outputs import place_images, rotary_positions

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlflow.engines.causal_lm.attention import CacheLayout
    from rlflow.engines.causal_lm.routing import Routers
    from rlflow.engines.vision.passes import Vision


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The tokens that one call of ``decode`` generated."""

    ids: list[NDArray[np.int32]]
    """The tokens of each of the B sequences, including the end token if there is one."""
    logprobs: list[NDArray[np.float32]]
    finished: NDArray[np.bool_]
    """[B]: True for each sequence that ended with an end token."""
    routing: "list[Routing] | None" = None
    """The experts of each sequence's tokens but the last, those of its prompt included. None if nobody asked."""


def decode(
    model: "PreTrainedModel",
    prompts: Prompts,
    sampling: Sampling,
    seeds: Sequence[int],
    end_ids: Sequence[int],
    vision: "Vision | None" = None,
    routers: "Routers | None" = None,
) -> NewTokens:
    """Generate ``group_size`` responses to each of P prompts, and record the experts that ``routers`` choose.

    A sequence's random draws depend on its own entry of ``seeds`` [B] alone. Tokens that stand for media are never
    sampled, because a pass could not tell them from images.
    """
    import torch

    device, batch = model.device, len(prompts) * sampling.group_size
    with torch.inference_mode(), nullcontext() if routers is None else routers.recording() as take_routing:
        logits, cache, lags, stream = _read_prompts(model, prompts, sampling, vision)
        routing = None if take_routing is None else _RoutingOfResponses(take_routing, stream, prompts, sampling)
        never = [] if vision is None else sorted(vision.family.media_ids)
        draws = torch.from_numpy(_uniform_draws(seeds, sampling)).to(device)
        ends = torch.tensor([*end_ids, *sampling.stop_ids], device=device)
        tokens = torch.empty(batch, sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.empty(batch, sampling.max_tokens, device=device)
        counts = torch.full((batch,), sampling.max_tokens, device=device)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        live = torch.arange(batch, device=device)
        for step in range(sampling.max_tokens):
            chosen, logprob = _sample(logits, sampling, draws[live, step], never)
            tokens[live, step], logprobs[live, step] = chosen, logprob
            ended = torch.isin(chosen, ends)
            if bool(ended.any()):
                finished[live[ended]] = True
                counts[live[ended]] = step + 1
                rows = cache.drop(ended)
                live, chosen = live[rows], chosen[rows]
            if len(live) == 0 or step + 1 == sampling.max_tokens:
                break
            at = cache.next_positions() + lags[live, None]
            logits = model(input_ids=chosen[:, None], position_ids=at, layout=cache, use_cache=False).logits[:, -1]
            if routing is not None:
                routing.add(step, live)
    sizes = counts.tolist()
    table, scores = tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()
    return NewTokens(
        ids=[table[row, :size] for row, size in enumerate(sizes)],
        logprobs=[scores[row, :size] for row, size in enumerate(sizes)],
        finished=finished.cpu().numpy(),
        routing=None if routing is None else routing.rows(sizes),
    )


class _RoutingOfResponses:
    """The experts of B sequences, which are recorded pass by pass."""

    def __init__(self, take: "Callable[[], Routing]", stream: Stream, prompts: Prompts, sampling: Sampling) -> None:
        """Take what was recorded when the prompts were read, as a stream."""
        records, self._group_size, self._take = take(), sampling.group_size, take
        ends = stream.predictors + 1
        self._prompts = [records[end - length : end] for end, length in zip(ends, prompts.ids.lengths, strict=True)]
        self._responses = np.zeros((len(prompts) * sampling.group_size, sampling.max_tokens), records.dtype)

    def add(self, step: int, live: "Tensor") -> None:
        """Take what was recorded when the sequences in ``live`` read the tokens of a step."""
        self._responses[live.cpu().numpy(), step] = self._take()

    def rows(self, sizes: Sequence[int]) -> list[Routing]:
        """Return the records of all sequences, whose responses have ``sizes`` [B] tokens."""
        return [
            np.concatenate([self._prompts[row // self._group_size], self._responses[row, : size - 1]])
            for row, size in enumerate(sizes)
        ]


def _read_prompts(
    model: "PreTrainedModel", prompts: Prompts, sampling: Sampling, vision: "Vision | None"
) -> "tuple[Tensor, CacheLayout, Tensor, Stream]":
    """Return the logits [B, V] of the first tokens, a cache with room for the responses, lags [B], and the stream.

    A lag is what the rotary position of a response's token has more than its place in the sequence. The stream holds
    the prompts.
    """
    import torch

    from rlflow.engines.causal_lm.attention import CacheLayout, PackedLayout

    device, group_size = model.device, sampling.group_size
    # A response of one token adds no input, so the stream holds just the prompts.
    one_each = Packed.from_rows([[0]] * len(prompts), np.int32)
    stream, pixels = place_images(pack(prompts.ids, one_each, prompts.images), prompts.images, vision)
    images = {} if vision is None else vision.encode(model, stream, stream, pixels).inputs
    prefill = PackedLayout(stream, device, model.dtype, keep_kv=True)
    ids, last = (torch.from_numpy(x).to(device) for x in (stream.ids, stream.predictors))
    output = model(
        input_ids=ids[None],
        position_ids=rotary_positions(stream, device),
        layout=prefill,
        logits_to_keep=last,
        use_cache=False,
        **images,
    )
    logits = output.logits[0].repeat_interleave(group_size, 0)
    lengths = torch.from_numpy(prompts.ids.lengths).to(device).repeat_interleave(group_size)
    rope = stream.positions[None] if stream.rope is None else stream.rope
    lags = rope[:, stream.predictors].max(axis=0) + 1 - prompts.ids.lengths
    first = last.repeat_interleave(group_size) - lengths + 1
    offsets = torch.arange(int(lengths.max()), device=device)
    prompt_places = torch.minimum(first[:, None] + offsets, (first + lengths - 1)[:, None])
    cache = CacheLayout(prefill, prompt_places, lengths, capacity=int(lengths.max()) + sampling.max_tokens)
    return logits, cache, torch.from_numpy(lags).to(device).repeat_interleave(group_size), stream


def _uniform_draws(seeds: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
    """Return [B, max_tokens] draws, uniform in [0, 1)."""
    if sampling.temperature == 0:
        return np.zeros((len(seeds), sampling.max_tokens))
    return np.stack([np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens) for seed in seeds])


def _sample(
    logits: "Tensor", sampling: Sampling, draws: "Tensor", never: Sequence[int] = ()
) -> "tuple[Tensor, Tensor]":
    """Return tokens [B] and their logprobs [B] from logits [B, V], by inverting the distribution at ``draws`` [B].

    The logprobs are taken at the scoring temperature, over the whole vocabulary. Tokens in ``never`` are not drawn.
    """
    import torch

    logits = logits.float()
    scores = torch.log_softmax(logits / sampling.scoring_temperature, dim=-1)
    allowed = scores
    if never:
        allowed = scores.index_fill(-1, torch.tensor(never, device=scores.device), float("-inf"))
    if sampling.temperature == 0:
        chosen = allowed.argmax(-1)
    else:
        probabilities = allowed.double().exp()
        if sampling.top_p < 1:
            descending, order = probabilities.sort(dim=-1, descending=True)
            outside = descending.cumsum(-1) - descending >= sampling.top_p
            probabilities = probabilities.scatter(-1, order, descending.masked_fill(outside, 0.0))
        cumulative = probabilities.cumsum(-1)
        chosen = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
        # Rounding may put a draw close to one at the very end.
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, scores.gather(-1, chosen[:, None])[:, 0]
