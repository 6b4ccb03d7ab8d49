"""Generation: prompts are read once for their whole group, and finished sequences leave the batch.

Shapes: P prompts, G group, B sequences (P x G), V vocabulary.
"""

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, eq=False)
class Decoded:
    ids: list[NDArray[np.int32]]
    """B responses, with the end token where there is one."""
    logprobs: list[NDArray[np.float32]]
    finished: NDArray[np.bool_]
    """[B]"""


def decode(
    model: "PreTrainedModel",
    prompts: Packed,
    sampling: Sampling,
    seeds: Sequence[int],
    end_ids: Sequence[int],
    written: NDArray[np.int64] | None = None,
    stop: Callable[[NDArray[np.int64]], bool] = lambda ended: False,
) -> Decoded:
    """``group_size`` responses to each of P prompts. ``seeds`` [B]: a sequence's draws depend on its own seed alone.

    ``written`` [B]: so many tokens at the end of each prompt are the beginning of the response. ``stop`` is told which
    sequences have just ended; when it says so, the others end as they are.
    """
    import torch

    from rlflow.engines.causal_lm.attention import CacheLayout, PackedLayout

    device = model.device
    batch = len(prompts) * sampling.group_size
    with torch.inference_mode():
        # One response token a prompt, which is no input: the stream holds the prompts alone.
        one_each = Packed.from_rows([[0]] * len(prompts), np.int32)
        stream = pack(prompts, one_each)
        prefill = PackedLayout(stream, device, keep_keys=True)
        ids, positions, last = (
            torch.from_numpy(x).to(device) for x in (stream.ids, stream.positions, stream.predictors)
        )
        output = model(
            input_ids=ids[None], position_ids=positions[None], layout=prefill, logits_to_keep=last, use_cache=False
        )
        logits = output.logits[0].repeat_interleave(sampling.group_size, 0)

        lengths = torch.from_numpy(prompts.lengths).to(device).repeat_interleave(sampling.group_size)
        begun = torch.from_numpy(np.zeros(batch, np.int64) if written is None else written).to(device)
        left = sampling.max_tokens - begun
        first = last.repeat_interleave(sampling.group_size) - lengths + 1
        offsets = torch.arange(int(lengths.max()), device=device)
        row_of = torch.minimum(first[:, None] + offsets, (first + lengths - 1)[:, None])
        cache = CacheLayout(prefill, row_of, lengths, capacity=int((lengths + left).max()))

        draws = torch.from_numpy(_draws(seeds, sampling)).to(device)
        ends = torch.tensor([*end_ids, *sampling.stop_ids], device=device)
        tokens = torch.empty(batch, sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.empty(batch, sampling.max_tokens, device=device)
        counts = torch.full((batch,), sampling.max_tokens, device=device)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        live = torch.arange(batch, device=device)
        for step in range(sampling.max_tokens):
            chosen, logprob = _sample(logits, sampling, draws[live, begun[live] + step])
            tokens[live, step], logprobs[live, step] = chosen, logprob
            ended = torch.isin(chosen, ends)
            done = ended | (left[live] == step + 1)
            if bool(done.any()):
                finished[live[ended]] = True
                counts[live[done]] = step + 1
                stopped = stop(live[done].cpu().numpy())
                rows = cache.drop(done)
                live, chosen = live[rows], chosen[rows]
                if stopped:
                    counts[live] = step + 1
                    break
            if len(live) == 0:
                break
            at = cache.next_positions()
            logits = model(input_ids=chosen[:, None], position_ids=at, layout=cache, use_cache=False).logits[:, -1]
    sizes = counts.tolist()
    table, scores = tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()
    return Decoded(
        ids=[table[row, :size] for row, size in enumerate(sizes)],
        logprobs=[scores[row, :size] for row, size in enumerate(sizes)],
        finished=finished.cpu().numpy(),
    )


def _draws(seeds: Sequence[int], sampling: Sampling) -> NDArray[np.float64]:
    """[B, max_tokens], uniform in [0, 1)."""
    if sampling.temperature == 0:
        return np.zeros((len(seeds), sampling.max_tokens))
    return np.stack([np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens) for seed in seeds])


def _sample(logits: "Tensor", sampling: Sampling, draws: "Tensor") -> "tuple[Tensor, Tensor]":
    """Tokens [B] and their logprobs [B] from logits [B, V], by inverting the distribution function at ``draws`` [B].

    The logprobs are those at the scoring temperature, over the whole vocabulary.
    """
    import torch

    logits = logits.float()
    scores = torch.log_softmax(logits / sampling.scoring_temperature, dim=-1)
    if sampling.temperature == 0:
        chosen = scores.argmax(-1)
    else:
        chances = scores.double().exp()
        if sampling.top_p < 1:
            falling, order = chances.sort(dim=-1, descending=True)
            outside = falling.cumsum(-1) - falling >= sampling.top_p
            chances = chances.scatter(-1, order, falling.masked_fill(outside, 0.0))
        heap = chances.cumsum(-1)
        chosen = torch.searchsorted(heap, draws[:, None] * heap[:, -1:], right=True)[:, 0]
        # A draw next to one may round up to the heap's end.
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, scores.gather(-1, chosen[:, None])[:, 0]
