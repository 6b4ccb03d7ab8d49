"""Generation token by token: a prompt is read once for its whole group, and finished sequences leave the batch.

Shapes: P prompts, G group size, B sequences (P x G), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.packing import pack

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlflow.engines.causal_lm.attention import CacheLayout


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The tokens that one call of ``decode`` generated."""

    ids: list[NDArray[np.int32]]
    """The tokens of each of the B sequences, including the end token if there is one."""
    logprobs: list[NDArray[np.float32]]
    finished: NDArray[np.bool_]
    """[B]: True for each sequence that ended with an end token."""


def decode(
    model: "PreTrainedModel",
    prompts: Packed,
    sampling: Sampling,
    seeds: Sequence[int],
    end_ids: Sequence[int],
) -> NewTokens:
    """Generate ``group_size`` responses to each of P prompts.

    A sequence's random draws depend on its own entry of ``seeds`` [B] alone.
    """
    import torch

    device, batch = model.device, len(prompts) * sampling.group_size
    with torch.inference_mode():
        logits, cache = _read_prompts(model, prompts, sampling)
        draws = torch.from_numpy(_uniform_draws(seeds, sampling)).to(device)
        ends = torch.tensor([*end_ids, *sampling.stop_ids], device=device)
        tokens = torch.empty(batch, sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.empty(batch, sampling.max_tokens, device=device)
        counts = torch.full((batch,), sampling.max_tokens, device=device)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        live = torch.arange(batch, device=device)
        for step in range(sampling.max_tokens):
            chosen, logprob = _sample(logits, sampling, draws[live, step])
            tokens[live, step], logprobs[live, step] = chosen, logprob
            ended = torch.isin(chosen, ends)
            if bool(ended.any()):
                finished[live[ended]] = True
                counts[live[ended]] = step + 1
                rows = cache.drop(ended)
                live, chosen = live[rows], chosen[rows]
            if len(live) == 0 or step + 1 == sampling.max_tokens:
                break
            at = cache.next_positions()
            logits = model(input_ids=chosen[:, None], position_ids=at, layout=cache, use_cache=False).logits[:, -1]
    sizes = counts.tolist()
    table, scores = tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()
    return NewTokens(
        ids=[table[row, :size] for row, size in enumerate(sizes)],
        logprobs=[scores[row, :size] for row, size in enumerate(sizes)],
        finished=finished.cpu().numpy(),
    )


def _read_prompts(model: "PreTrainedModel", prompts: Packed, sampling: Sampling) -> "tuple[Tensor, CacheLayout]":
    """Return the logits [B, V] of the first tokens, and a cache with room for the responses."""
    import torch

    from rlflow.engines.causal_lm.attention import CacheLayout, PackedLayout

    device, group_size = model.device, sampling.group_size
    # A response of one token adds no input, so the stream holds just the prompts.
    one_each = Packed.from_rows([[0]] * len(prompts), np.int32)
    stream = pack(prompts, one_each)
    prefill = PackedLayout(stream, device, model.dtype, keep_kv=True)
    ids, positions, last = (torch.from_numpy(x).to(device) for x in (stream.ids, stream.positions, stream.predictors))
    output = model(
        input_ids=ids[None], position_ids=positions[None], layout=prefill, logits_to_keep=last, use_cache=False
    )
    logits = output.logits[0].repeat_interleave(group_size, 0)
    lengths = torch.from_numpy(prompts.lengths).to(device).repeat_interleave(group_size)
    first = last.repeat_interleave(group_size) - lengths + 1
    offsets = torch.arange(int(lengths.max()), device=device)
    prompt_places = torch.minimum(first[:, None] + offsets, (first + lengths - 1)[:, None])
    return logits, CacheLayout(prefill, prompt_places, lengths, capacity=int(lengths.max()) + sampling.max_tokens)


def _uniform_draws(seeds: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
    """Return [B, max_tokens] draws, uniform in [0, 1)."""
    if sampling.temperature == 0:
        return np.zeros((len(seeds), sampling.max_tokens))
    return np.stack([np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens) for seed in seeds])


def _sample(logits: "Tensor", sampling: Sampling, draws: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return tokens [B] and their logprobs [B] from logits [B, V], by inverting the distribution at ``draws`` [B].

    The logprobs are taken at the scoring temperature, over the whole vocabulary.
    """
    import torch

    logits = logits.float()
    scores = torch.log_softmax(logits / sampling.scoring_temperature, dim=-1)
    if sampling.temperature == 0:
        chosen = scores.argmax(-1)
    else:
        probabilities = scores.double().exp()
        if sampling.top_p < 1:
            descending, order = probabilities.sort(dim=-1, descending=True)
            outside = descending.cumsum(-1) - descending >= sampling.top_p
            probabilities = probabilities.scatter(-1, order, descending.masked_fill(outside, 0.0))
        cumulative = probabilities.cumsum(-1)
        chosen = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
        # Rounding may put a draw close to one at the very end.
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, scores.gather(-1, chosen[:, None])[:, 0]
