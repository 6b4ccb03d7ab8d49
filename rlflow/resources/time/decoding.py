"""The time of generation: an engine with continuous batching, over a distribution of response lengths."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, hypot

from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import MAX_BATCHED_TOKENS
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Speed
from rlflow.resources.time.turns import ONE_TURN, TurnProfile
from rlflow.resources.time.work import forward_work, image_seconds

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
    tensor, stages, eager = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.eager is True
    decoder = decoder_of(model, tensor, stages, speed, weight_bytes, eager)
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


def _pace(decoder: "Decoder", requests: Requests, slots: float) -> "Pace":
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

    decoder: "Decoder"
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


@dataclass(frozen=True)
class Decoder:
    """The costs of a decoding step, which generates one token of each active sequence, in seconds."""

    dense: float
    """Time to read all weights except routed experts."""
    experts: float
    """Time to read all routed experts."""
    chosen: float
    """The share of a layer's experts that a token uses."""
    arithmetic: float
    each: float
    """Other time of a sequence: its part of the all-reduces, and its host work."""
    step: float
    keys: float
    """Time for each token of context in layers that attend to all of it."""
    windowed_keys: float
    window: float
    width: int
    launches: float
    """The least time of a step, to launch its kernels."""
    forward: tuple[Architecture, int]
    boundaries: int
    """Times that a token's hidden states go from one host to the next."""
    value_bytes: float
    """The size of an activation and of a value in the KV cache."""
    is_cpu: bool

    def seconds(self, active: float, context: float) -> float:
        """Return the time of a step.

        A GPU reads weights while it multiplies, though never quite; a CPU does one after the other. The KV cache has
        kernels of its own.
        """
        weights = self.dense
        if self.experts:
            weights += self.experts * (1 - (1 - self.chosen) ** active)
        computed = active * self.arithmetic
        products = weights + computed if self.is_cpu else hypot(weights, computed)
        return max(self.launches, products + active * (self.each + self.key_seconds(context)) + self.step)

    def key_seconds(self, context: float) -> float:
        """Return the time to read the KV cache of one sequence."""
        if not self.windowed_keys:
            return context * self.keys
        return context * self.keys + min(context, self.window) * self.windowed_keys

    def prefill(self, speed: Speed, tokens: float, length: float) -> float:
        """Return the time of prompts, in batches of thousands of tokens."""
        model, gpus = self.forward
        speed = speed.burst
        message = 2 * model.num_blocks * 2 * model.hidden_size * (self.width - 1) / self.width
        moved = tokens * (message / speed.ring(self.width) + self.boundaries * _stage_message(model, speed))
        work = forward_work(model, self.value_bytes)
        computed = work.product_seconds(speed, tokens) + work.other_seconds(speed, tokens, length, fused=True)
        batches = ceil(tokens / MAX_BATCHED_TOKENS)
        return computed / gpus + moved + batches * model.num_blocks / 2 * speed.efficiency.prefill_layer_s


def _stage_message(model: Architecture, speed: Speed) -> float:
    """Return the time to send what a stage knows of a token, its hidden states and their residual, to another host.

    Each tensor-parallel rank sends a part (vllm/distributed/parallel_state.py, send_tensor_dict).
    """
    return 2 * 2 * model.hidden_size / (speed.network * speed.efficiency.link * speed.gpus_per_host)


@lru_cache(maxsize=1024)
def decoder_of(
    model: Architecture, width: int, stages: int, speed: Speed, weight_bytes: float, eager: bool = False
) -> Decoder:
    """Return the decoder of a group of ``width`` tensor-parallel GPUs in ``stages``.

    The stages work on different sequences: every sequence passes all weights, each stage has the host's time of a step,
    and the other times are shared.
    """
    # Quantized weights are multiplied with values of two bytes.
    value_bytes = max(2.0, weight_bytes)
    work, matmul = forward_work(model, value_bytes), speed.burst.matmul_of(model.hidden_size)
    efficiency, blocks = speed.efficiency, model.num_blocks
    # Each GPU has its share of the heads. Key-value heads are copied if there are fewer than GPUs; latents always.
    copies = 1 if model.kv_lora_rank else min(model.num_key_value_heads, width)
    reading = speed.memory * efficiency.cache
    cached, in_window = (value_bytes * values / copies / reading for values in model.cached_widths)
    # With latent attention all heads work on the same few bytes (DeepSeek-V2, section 2.1.2, matrices absorbed).
    if model.kv_lora_rank:
        latent = model.kv_lora_rank * 2 + (model.qk_rope_head_dim or 0)
        flops = 2 * model.num_attention_heads / width * latent
        cached = max(cached, flops / (speed.matmul * efficiency.attention))
    windowed = model.num_windowed_layers
    # Every stage has a batch of its own, whose host work comes before its kernels.
    # Experts have a router and a kernel to sort tokens besides their products.
    step = (blocks + model.num_sparse_layers) / 2 * efficiency.decode_layer_s + stages * efficiency.decode_step_s
    each = efficiency.decode_sequence_s
    if model.recurrent is not None:
        # States are read and written.
        each += 2 * model.recurrent.state_bytes / (width * stages) / speed.memory
    if speed.is_cpu:
        # On a GPU these kernels are fused, and the launches in ``decode_layer_s`` take longer.
        each += work.moved_bytes / (speed.memory * efficiency.elementwise)
    if width > 1:
        message = 2 * model.hidden_size * 2 * (width - 1) / width / speed.ring(width)
        step += blocks * efficiency.decode_message_s * (3 if width > speed.gpus_per_host else 1)
        each += blocks * message / stages
    # An engine on several hosts has an equal number of stages on each.
    boundaries = max(0, min(stages, ceil(width * stages / speed.gpus_per_host)) - 1)
    step += boundaries * efficiency.decode_message_s * 3
    each += boundaries * _stage_message(model, speed) / stages
    head = model.vocab_size * model.hidden_size if model.head_parameters == 0 else 0
    dense = model.num_parameters - model.num_expert_parameters - model.embedding_parameters + head
    return Decoder(
        dense=weight_bytes * dense / width / speed.memory,
        experts=weight_bytes * model.num_expert_parameters / width / speed.memory,
        chosen=(model.num_experts_per_tok or 0) / (model.num_experts or 1),
        arithmetic=(work.dense_flops + work.expert_flops / efficiency.expert_matmul) / (width * stages * matmul),
        each=each,
        step=step,
        keys=(model.num_attention_layers - windowed) * cached / stages,
        windowed_keys=windowed * in_window / stages,
        window=float(model.sliding_window or 0),
        width=width,
        launches=blocks / 2 * efficiency.eager_layer_s + efficiency.decode_step_s if eager else 0.0,
        forward=(model, width * stages),
        boundaries=boundaries,
        value_bytes=value_bytes,
        is_cpu=speed.is_cpu,
    )
