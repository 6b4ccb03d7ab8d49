"""The time of a decoding step, which generates one token of each active sequence, and of prompts."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, hypot, log, sqrt

from rlflow.resources.memory.phases import MAX_BATCHED_TOKENS
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.speed import Speed
from rlflow.resources.time.work import forward_work


@dataclass(frozen=True)
class Decoder:
    """The costs of a decoding step, which generates one token of each active sequence, in seconds."""

    dense: float
    """Time to read all weights except routed experts."""
    experts: float
    """Time to read all routed experts."""
    chosen: float
    """The share of a layer's experts that a token uses."""
    spread: float
    """How much more of its experts the busiest GPU reads than the average one, in standard deviations of a single
    expert; 0 where each GPU has a part of all experts."""
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
            weights += self.experts * self.read_share(active)
        computed = active * self.arithmetic
        products = weights + computed if self.is_cpu else hypot(weights, computed)
        return max(self.launches, products + active * (self.each + self.key_seconds(context)) + self.step)

    def read_share(self, active: float) -> float:
        """Return the share of its experts that the busiest GPU reads in a step."""
        mean: float = 1 - (1 - self.chosen) ** active
        return min(1.0, mean + self.spread * sqrt(mean * (1 - mean)))

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
        products = work.product_seconds(speed, tokens, spreads_experts=self.spread > 0)
        computed = products + work.other_seconds(speed, tokens, length, fused=True)
        batches = ceil(tokens / MAX_BATCHED_TOKENS)
        return computed / gpus + moved + batches * model.num_blocks / 2 * speed.efficiency.prefill_layer_s


def _stage_message(model: Architecture, speed: Speed) -> float:
    """Return the time to send what a stage knows of a token, its hidden states and their residual, to another host.

    Each tensor-parallel rank sends a part (vllm/distributed/parallel_state.py, send_tensor_dict).
    """
    return 2 * 2 * model.hidden_size / (speed.network * speed.efficiency.link * speed.gpus_per_host)


@lru_cache(maxsize=1024)
def decoder_of(
    model: Architecture,
    width: int,
    stages: int,
    speed: Speed,
    weight_bytes: float,
    *,
    eager: bool = False,
    whole_experts: bool = False,
) -> Decoder:
    """Return the decoder of a group of ``width`` tensor-parallel GPUs in ``stages``.

    The stages work on different sequences: every sequence passes all weights, each stage has the host's time of a step,
    and the other times are shared. ``whole_experts``: each GPU has experts of its own.
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
    # The largest of ``width`` sums of independent choices is about sqrt(2 ln width) standard deviations above the mean.
    spread = sqrt(2 * log(width) * width / model.num_experts) if whole_experts and model.num_experts else 0.0
    expert_flops = work.expert_flops / (efficiency.expert_matmul * (efficiency.expert_balance if spread else 1.0))
    dense = model.num_parameters - model.num_expert_parameters - model.embedding_parameters + head
    return Decoder(
        dense=weight_bytes * dense / width / speed.memory,
        experts=weight_bytes * model.num_expert_parameters / width / speed.memory,
        chosen=(model.num_experts_per_tok or 0) / (model.num_experts or 1),
        spread=spread,
        arithmetic=(work.dense_flops + expert_flops) / (width * stages * matmul),
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
