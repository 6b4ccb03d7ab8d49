"""The time of generation: an engine with continuous batching, over a distribution of response lengths."""

from dataclasses import dataclass
from math import ceil, exp

from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoder import Decoder, decoder_of
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Speed
from rlflow.resources.time.turns import ONE_TURN, TurnProfile
from rlflow.resources.time.work import image_seconds

# Halvings of the interval in which the number of sequences is searched that do not wait: to 0.02 % of it.
_HALVINGS = 12


@dataclass(frozen=True)
class Generation:
    """The generation of one engine's share of a batch."""

    seconds: float
    prefill_seconds: float
    concurrency: float
    """Sequences that run at first, or wait for their agents: all, or as many as the KV cache has room for."""
    context: float
    """The mean context of a token while the batch is full."""
    pace: "Pace"

    @property
    def token_seconds(self) -> float:
        """Return the time between two tokens of a turn while the batch is full."""
        return self.pace.step_seconds(self.pace.active(self.concurrency, self.context), self.context)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The sequences that one engine generates."""

    sequences: float
    group_size: float = 1
    """The number of them that share a prompt, which is read once."""
    prompts: Lengths
    responses: Lengths
    engines: float = 1
    """The number of engines that generate as many, and of which the slowest decides."""
    turns: TurnProfile = ONE_TURN
    caches: bool = True
    """The engine keeps what it has read for the next turn."""
    image_tokens: float = 0.0
    """Tokens of a prompt that stand for its images."""


def generation(
    model: Architecture,
    layout: Layout,
    speed: Speed,
    requests: Requests,
    *,
    kv_tokens: float,
    max_num_seqs: int = 1024,
    weight_bytes: float = 2,
) -> Generation:
    """Predict how long one engine generates with continuous batching, until all engines have finished.

    While sequences wait, free places are filled again, and the batch becomes a mixture of all ages; this happens sooner
    if lengths vary more. The mean context, and what is left when none waits, are those of a renewal process. Every
    token is counted once.
    """
    sequences, turns, prompt = requests.sequences, requests.turns, requests.prompts.mean
    tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    decoder = decoder_of(
        model,
        tensor,
        stages,
        speed,
        weight_bytes,
        eager=layout.eager is True,
        whole_experts=layout.expert_parallel_size > 1,
    )
    context = prompt + requests.responses.residual / turns.segments
    room = kv_tokens / (context + model.state_tokens(tensor))
    pace = _pace(decoder, requests, max(1.0, min(float(max_num_seqs), room)))
    mean, residual = pace.steps.mean, pace.steps.residual
    # Sequences that wait for their agents need no slot, but room in the cache.
    full = max(1.0, min(sequences, room if turns.wait_s else pace.slots))
    # Free places are filled all at once, as with equal lengths, or one by one, as far as the batch is ``mixed``.
    batches = ceil(sequences / full - 1e-9) - 1
    mixed = 1 - exp(-3 * pace.steps.relative_variance * (sequences / full - 1)) if batches else 0.0
    last = sequences - batches * full
    seconds = 0.0
    if batches:
        before = (1 - mixed) * batches * full * mean + mixed * (sequences * mean - full * residual)
        seconds = before / full * pace.seconds(full, context)
    seconds += _tail(pace, requests, last=last, full=full, mixed=mixed)
    if batches:
        # Waiting never makes the batch faster than if there were room for all, and the longest takes its time anyway.
        seconds = max(seconds, _tail(pace, requests, last=sequences, full=0.0, mixed=0.0))
    read = turns.read_tokens(prompt, requests.responses, requests.group_size, caches=requests.caches)
    prefill = decoder.prefill(speed, sequences * read, context if turns.count > 1 else prompt)
    images = requests.image_tokens
    prefill += image_seconds(model, speed, sequences / requests.group_size * images, images) / tensor
    return Generation(seconds + prefill, prefill, full, context, pace)


def _pace(decoder: Decoder, requests: Requests, slots: float) -> "Pace":
    responses, turns = requests.responses, requests.turns
    # Waits matter at the end, when a step has few sequences.
    steps = turns.steps(responses, decoder.seconds(1.0, requests.prompts.mean + responses.mean / turns.segments))
    return Pace(
        decoder=decoder,
        slots=slots,
        steps=steps,
        generated=(responses.mean - turns.added_tokens) / steps.mean,
        wait_s=turns.count * turns.wait_s / steps.mean,
    )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The progress of responses, in decoding steps and in waits for agents that count as such."""

    decoder: Decoder
    slots: float
    """Sequences that are generated at once, at most."""
    steps: Lengths
    """The lengths of responses in such steps."""
    generated: float
    """The share of these steps in which a response is generated."""
    wait_s: float
    """The seconds of waiting for each step."""

    def active(self, live: float, context: float) -> float:
        """Return how many of ``live`` sequences are generated at a time. The others wait for agents, or for a slot."""
        if not self.wait_s:
            return live
        # As many begin to wait for their agents as end waiting. With more sequences, all slots are in use.
        low, high = 0.0, min(live, self.slots)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if middle * self.wait_s < (live - middle) * self.generated * self.step_seconds(middle, context):
                low = middle
            else:
                high = middle
        return high

    def step_seconds(self, active: float, context: float) -> float:
        """Return the time of a decoding step."""
        return self.decoder.seconds(max(1.0, active), context)

    def seconds(self, live: float, context: float) -> float:
        """Return the mean time of a step of each of ``live`` responses."""
        active = self.active(live, context)
        return live / active * self.generated * self.step_seconds(active, context)


def _tail(pace: Pace, requests: Requests, *, last: float, full: float, mixed: float) -> float:
    """Return the seconds from when none waits for room.

    ``last`` sequences start together, and, as far as the batch is ``mixed``, ``full`` sequences have all ages.
    """
    steps, seconds = pace.steps, 0.0
    tokens = requests.responses.mean / steps.mean / requests.turns.segments
    width = steps.longest / len(steps.survival)
    at = width / 2
    for fresh, later in zip(steps.survival, steps.residual_survival, strict=True):
        active = (1 - mixed) * last * fresh + mixed * full * later
        context = requests.prompts.mean + tokens * min(steps.longest, at + mixed * steps.residual)
        if active >= 4:
            seconds += width * pace.seconds(active, context)
        elif active > 1e-9 and last:  # beyond 2**53 sequences, rounding may leave none
            # The last few: time passes while any of them runs.
            share = 1 - (1 - min(1.0, active / last)) ** (last * requests.engines)
            seconds += width * share * pace.seconds(max(1.0, active), context)
        at += width
    return seconds
