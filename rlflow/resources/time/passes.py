"""The time of training and scoring passes, weight syncs and data transfers on GPUs of one kind, in seconds."""

from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.speed import Speed
from rlflow.resources.time.work import forward_work, image_seconds, muon_seconds

# Kernels of a layer with adapters, for each of one without. Qwen-7B with micro-batches of 256 tokens takes 4.7 ms for
# each layer of LoRA steps (QwenLM/Qwen, README.md), which is bound by launches.
_ADAPTER_LAUNCHES = 2.3
# Parameters per second that the CPUs of a host update. Adam is bound by their memory: 28 bytes each at about
# 200 GB/s (Ren et al. 2021, ZeRO-Offload, table 4: 10 billion in about a second).
_HOST_ADAM = 8e9
# Bytes per second between a GPU and its host's memory: PCIe 4.0 x16 with pinned buffers, which all engines use.
_PINNED = 20e9
# Bytes per second that a host copies into its object store or out of it (176 MB, in and out, took 0.10 to 0.13 s on two
# cores), bytes per second that it sends to others over TCP, and seconds until the first byte.
_STORE_COPY, _STORE_TCP, _STORE_S = 3e9, 1.5e9, 5e-3
# Python time on the controller: of a step, and of collecting, decoding, scoring by rule and packing a sample and each
# token of its response. 1,024 samples of 4 tokens took 0.08 s (benchmarks/RESULTS.md, "On a GPU"); published logs of
# NeMo-RL have 4 s for 2,048 samples of about 3,200 tokens.
_HOST_STEP_S, _HOST_SAMPLE_S, _HOST_TOKEN_S = 0.1, 0.08e-3, 0.6e-6
# Time of each tensor of the file in a weight sync: it is gathered, renamed, looked up and copied into the engine.
SYNC_TENSOR_S = 0.7e-3
MIN_COMPILED_WIDTH = 512
"""The least hidden size of compiled models; a smaller one makes a step in less time than compiling takes."""


@dataclass(frozen=True)
class Pass:
    """The seconds of a pass over a role's share of the samples."""

    compute: float
    communication: float
    """Communication that compute does not hide, and the time in which a pipeline fills and drains."""

    @property
    def seconds(self) -> float:
        """Return the whole time of the pass."""
        return self.compute + self.communication


@dataclass(frozen=True, kw_only=True)
class PassBatch:
    """The sequences that all ranks of a role pass through their model."""

    tokens: float
    """The tokens of all sequences."""
    length: float
    """The tokens of a typical sequence."""
    computed: float = 1.0
    """The share of the tokens that pass through the model, where the rows of a prompt share its tokens."""
    minibatches: int = 1
    """The optimizer steps of an update."""
    image_tokens: float = 0.0
    """The part of the computed tokens that stands for images."""
    tokens_per_image: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The way in which a library computes a pass."""

    value_bytes: float = 2
    """The size of an activation."""
    gradient_bytes: float = 2
    adapters: bool = False
    """Only adapters have gradients, which halves the matrix products of the backward pass."""
    fused_layers: bool = False
    trains_vision: bool = False
    """The part of the model that reads images is trained."""
    muon: bool = False
    logit_bytes: tuple[float, float] = (24, 12)
    """Bytes that the output layer reads and writes for each logit besides its products, in training and in scoring."""
    recomputes_logits: bool = False
    """Logits are computed once more for their gradients."""
    flash: bool = True
    forwards_tokens: bool = False
    """A token goes to each host with some of its experts once, not once for each expert (DeepEP)."""


def training(model: Architecture, layout: Layout, speed: Speed, batch: PassBatch, kernels: Kernels = Kernels()) -> Pass:
    """Predict forward, backward (twice that) and optimizer over a batch, over all ranks."""
    step = _passes(
        model,
        layout,
        speed,
        batch,
        kernels,
        _Products(
            forward=1 + layout.recomputed_share(model.num_hidden_layers),
            backward=1 if kernels.adapters else 2,
            heads=1 if kernels.recomputes_logits else 0,
            logit_bytes=kernels.logit_bytes[0],
        ),
    )
    if kernels.adapters:
        return step
    reduced = 0.0
    if layout.zero_stage != 3:
        # Gradients scattered or reduced, weights or gradients gathered: half hides behind the backward pass.
        reduced = (kernels.gradient_bytes / 2 + 2) * _spread_seconds(model, layout, speed)
    owned = model.num_parameters / (layout.num_shards * layout.model_parallel_size)
    if not layout.zero_stage:
        owned = model.num_parameters / layout.model_parallel_size
    # Adam reads gradient, master copy and two moments, and writes the last three and the weight.
    update = owned * 30 / speed.memory + (muon_seconds(model, layout, speed) if kernels.muon else 0.0)
    if layout.offload in ("optimizer", "weights"):
        update = owned * (speed.gpus_per_host / _HOST_ADAM + (kernels.gradient_bytes + 2) / _PINNED)
    return Pass(step.compute + batch.minibatches * update, step.communication + batch.minibatches * reduced)


def scoring(model: Architecture, layout: Layout, speed: Speed, batch: PassBatch, kernels: Kernels = Kernels()) -> Pass:
    """Predict a forward pass over a batch, over all ranks."""
    return _passes(
        model, layout, speed, batch, kernels, _Products(forward=1, backward=0, logit_bytes=kernels.logit_bytes[1])
    )


@dataclass(frozen=True, kw_only=True)
class _Products:
    """The matrix products of passes, in forward passes' worth. All else takes twice as long backward."""

    forward: float
    backward: int
    heads: int = 0
    """Forward passes of the output layer alone."""
    logit_bytes: float
    """The bytes that are moved for each logit."""


def _passes(
    model: Architecture, layout: Layout, speed: Speed, batch: PassBatch, kernels: Kernels, products: _Products
) -> Pass:
    """Return the time of passes over the model."""
    forward, backward, minibatches = products.forward, products.backward, batch.minibatches
    fused, adapters = kernels.fused_layers, kernels.adapters and backward > 0
    gradient_bytes = kernels.gradient_bytes if backward and not adapters else 0
    efficiency = speed.efficiency
    width, stages, sequence = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.sequence_parallel_size
    blocks = model.num_blocks / stages
    # The rank with the most work decides.
    share = batch.tokens / layout.data_parallel_size / efficiency.balance
    micro_batches = max(minibatches, ceil(share / layout.micro_batch_tokens))
    attending = share / micro_batches / sequence
    here = attending * batch.computed
    work, passes = forward_work(model, kernels.value_bytes), forward + (2 if backward else 0)
    multiplied = (forward + backward) * work.product_seconds(
        speed, here, spreads_experts=layout.expert_parallel_size > 1
    )
    multiplied += products.heads * 2 * here * model.num_outputs * model.hidden_size / speed.matmul_of(model.hidden_size)
    if here and not speed.is_cpu:
        multiplied *= 1 + efficiency.small_batch_tokens / here
    # Every rank of a sequence encodes its images; what is frozen, forward alone.
    images = batch.image_tokens / layout.data_parallel_size / efficiency.balance / micro_batches
    images *= forward + backward if kernels.trains_vision else 1
    other = work.other_seconds(
        speed, here, batch.length, fused=fused, flash=kernels.flash, adapters=adapters, attending=attending
    )
    arithmetic = multiplied + passes * other
    compute = image_seconds(model, speed, images, batch.tokens_per_image) + arithmetic / (width * stages)
    compute += here * model.num_outputs * products.logit_bytes / width / speed.memory
    launch = efficiency.train_layer_s * (0.5 if fused else 1.0) * (_ADAPTER_LAUNCHES if adapters else 1.0)
    launches = passes * (blocks / 2 * launch + efficiency.expert_layer_s * model.num_sparse_layers / stages)
    compute = compute + launches if speed.is_cpu else max(compute, launches)

    sent = 2 * here * model.hidden_size  # the bytes of a micro-batch's hidden states
    # Each collective of a forward pass has its like in the backward pass, and is repeated where that recomputes.
    collectives = forward + (1 if backward else 0)
    communication = 0.0
    if width > 1:
        # Two all-reduces (Shoeybi et al. 2019, figure 4), or as many bytes gathered and scattered.
        message = 2 * sent * (width - 1) / width / speed.ring(width)
        communication += collectives * blocks * (speed.message_s(width) + message)
    if layout.expert_parallel_size > 1:
        # To the experts and back, each token to as many as it takes (Lepikhin et al. 2020, section 3.2).
        peers = layout.expert_parallel_size
        inputs = sent * (model.moe_latent_size or model.hidden_size) / model.hidden_size / width
        routed = inputs * speed.dispatch_s(peers, model.num_experts_per_tok or 1, forwards=kernels.forwards_tokens)
        exchanged = 2 * collectives * model.num_sparse_layers / stages
        communication += exchanged * (speed.message_s(peers) + routed / efficiency.expert_balance)
    if sequence > 1:
        # Queries, keys and values to the ranks of their heads, the output back (Jacobs et al. 2023, section 3.2).
        moved = 2 * here * (model.query_width + model.key_value_width + model.output_width) / width
        group = width * sequence
        attention = collectives * model.num_attention_layers / stages
        communication += attention * (4 * speed.message_s(group) + moved / speed.exchange(group))
    if stages > 1:
        between = speed.network if layout.num_gpus > speed.gpus_per_host else speed.link
        communication += (2 if backward else 1) * sent / width / (between * efficiency.link)
    if layout.offload == "weights":
        # From the host for every pass over the layers, each GPU the part that it owns.
        owned = model.num_parameters / layout.num_gpus
        communication += 2 * (forward + (1 if backward else 0)) * owned / _PINNED
    once = 0.0
    if layout.zero_stage == 3:
        # Weights gathered forward, recomputing and backward, gradients scattered (Rajbhandari et al. 2020).
        gathers = forward + (1 if backward else 0)
        if layout.num_replicas is not None:
            # torch recomputes a layer with the weights that it gathers for its gradients.
            gathers = 2 if backward else 1
            once += minibatches * _exposed(_replicas_seconds(model, layout, speed, gradient_bytes), compute, speed)
        byte_s = _spread_seconds(model, layout, speed)
        spread = (2 * gathers + gradient_bytes) * byte_s
        if layout.reduces_once:
            spread = 2 * gathers * byte_s
            once += minibatches * _exposed(gradient_bytes * byte_s, compute, speed)
        if stages > 1:
            # Between the micro-batches of a pipeline a stage keeps its weights and gradients.
            once += minibatches * spread
        else:
            communication += _exposed(spread, compute, speed)
    # The pipeline fills and drains once a minibatch (Narayanan et al. 2021, section 2.2).
    idle = minibatches * (stages - 1)
    return Pass(micro_batches * compute, (micro_batches + idle) * communication + idle * compute + once)


def _exposed(seconds: float, compute: float, speed: Speed) -> float:
    """Return the part of a transfer that a pass which computes for so long does not hide."""
    return max((1 - speed.efficiency.overlap) * seconds, seconds - compute)


def _replicas_seconds(model: Architecture, layout: Layout, speed: Speed, gradient_bytes: float) -> float:
    """Return the time to sum the gradients of all replicas: the ranks with the same shard, each in a ring."""
    replicas, shards = layout.num_replicas or 1, layout.num_shards * layout.tensor_parallel_size
    return 2 * gradient_bytes * _ring_seconds(model.num_parameters / shards, replicas, shards, speed)


def _spread_seconds(model: Architecture, layout: Layout, speed: Speed) -> float:
    """Return the time to send a byte of each parameter from the ranks that shard its state to all of them.

    Tensor-parallel ranks are neighbours, then the ranks that shard state, then the stages of a pipeline.
    """
    width, experts = layout.tensor_parallel_size, layout.expert_parallel_size
    sharing = layout.num_shards
    routed = model.num_expert_parameters / layout.pipeline_parallel_size
    dense = model.num_parameters / layout.pipeline_parallel_size - routed
    if experts == 1:
        return _ring_seconds((dense + routed) / width, sharing, width, speed)
    seconds = _ring_seconds(dense / width, sharing, width, speed)
    return seconds + _ring_seconds(routed / experts, max(1, sharing * width // experts), experts, speed)


def _ring_seconds(parameters: float, ranks: int, stride: int, speed: Speed) -> float:
    """Return the time of a ring between ``ranks`` that are ``stride`` GPUs apart; GPUs of a host share its links."""
    if ranks == 1:
        return 0.0
    rate = speed.link
    if ranks * stride > speed.gpus_per_host:
        rate = min(speed.link, speed.network * max(1.0, speed.gpus_per_host / stride))
    return parameters * (ranks - 1) / ranks / (rate * speed.efficiency.link)


def sync_seconds(
    weight_bytes: float, source_gpus: int, target_gpus: int, speed: Speed, *, same_gpus: bool, tensors: int = 0
) -> float:
    """Return the time to send weights from a trained role to the GPUs of a role that follows it, part by part.

    Every target receives every part through its own share of the network, and keeps what it needs (NeMo-RL and verl by
    CUDA IPC on the same GPUs, and by a broadcast to others, as OpenRLHF). ``tensors``: those of the model's file.
    """
    gpus = source_gpus if same_gpus else source_gpus + target_gpus
    rate = speed.link if gpus <= speed.gpus_per_host else min(speed.link, speed.network)
    return speed.efficiency.sync_s + max(weight_bytes / (rate * speed.efficiency.link), tensors * SYNC_TENSOR_S)


def gather_seconds(model: Architecture, layout: Layout, speed: Speed) -> float:
    """Return the time to gather a trained role's sharded weights once on every rank, in bf16."""
    return 2 * _spread_seconds(model, layout, speed)


def transfer_seconds(
    size: float, from_hosts: int, to_hosts: int, speed: Speed, *, crosses: bool, same_hosts: bool
) -> float:
    """Return the time to move bytes from the object stores of ``from_hosts``, each byte to one of ``to_hosts``.

    ``crosses``: the roles are on several hosts. Between the same hosts a part stays where it is.
    """
    seconds = _STORE_S + 2 * size / min(from_hosts, to_hosts) / _STORE_COPY
    if not crosses:
        return seconds
    leaves = size * (1 - 1 / from_hosts) if same_hosts else size
    rate = min(_STORE_TCP, speed.network * speed.gpus_per_host * speed.efficiency.link)
    return seconds + leaves / min(from_hosts, to_hosts) / rate


def offload_seconds(size: float) -> float:
    """Return the time to move bytes from a GPU to its host's memory or back, for all GPUs of a host at once."""
    return size / _PINNED


def host_seconds(samples: float, response_tokens: float) -> float:
    """Return the time of the controller's own work in a step, which overlaps with nothing.

    ``response_tokens`` is the mean length of a response.
    """
    return _HOST_STEP_S + samples * (_HOST_SAMPLE_S + _HOST_TOKEN_S * response_tokens)
