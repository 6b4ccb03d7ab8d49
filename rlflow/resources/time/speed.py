"""The speed of a kind of GPU: its data sheet, how much of it is reached, and the cost of a token's forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt, Le

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Gpu
from rlflow.schema import Section

Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
Seconds = Annotated[float, Ge(0)]

# Operations per byte of bandwidth. The best matrix products reach 1 / (1 + peak / bandwidth / this) of the peak, since
# tiles must be fed: 0.87 on A100, 0.80 on H100, 0.78 on B200 (S. Bekman, Machine Learning Engineering, "Maximum
# Achievable Matmul FLOPS").
_FEED = 1080


@dataclass(frozen=True, kw_only=True)
class Efficiency(Section):
    """The shares of a data sheet that are reached. The defaults apply to a kind of GPU that was not measured."""

    matmul: Fraction = 0.9
    """Share that a model's matrix products reach of what the best ones reach.

    With norms, activations and attention, whose time is counted apart, whole training steps of 7B to 70B then reach
    half of the peak of an A100 and two fifths of an H100's (torchtitan, docs/performance.md: 0.52 to 0.58 on A100;
    Llama 3 Herd, table 4: 0.38 to 0.43 on H100)."""
    small_batch_tokens: Annotated[float, Ge(0)] = 128.0
    """Tokens of a micro-batch with which matrix products reach half of that share.

    Steps of Qwen-7B and 14B with 1024 tokens are 15% slower for each token than with 8192 (QwenLM/Qwen, README.md)."""
    expert_matmul: Fraction = 0.5
    """Share that the narrow, grouped products of experts reach of what dense products reach."""
    expert_balance: Fraction = 0.8
    """Tokens of the average rank, as a share of those of the rank with the most wanted experts, where experts are
    spread over ranks. Fitted to published runs."""
    attention: Fraction = 0.7
    """Share that attention reaches of dense products, forward and backward (Dao 2023, FlashAttention-2, figures 5 to
    7); measured kernels of vLLM reach 0.64 on A100, 0.66 on B200 and 0.77 on H100 in prompts of 8192 tokens."""
    memory: Fraction = 0.75
    """Share of the memory bandwidth that decoding and elementwise kernels reach; published values are 0.6 to 0.85."""
    elementwise: Fraction = 1.0
    """Share of this that the elementwise kernels of a pass reach. On CPUs they also allocate, cast and copy."""
    link: Fraction = 0.7
    """Share of a link's bandwidth in collectives over large messages (nccl-tests, bus bandwidth over data sheet)."""
    overlap: Fraction = 0.25
    """Share of ZeRO-3's gathers and reductions that can overlap with computation. Fitted to published runs."""
    balance: Fraction = 0.9
    """Work of the average rank, as a share of the busiest rank's; packed micro-batches are about as full."""
    message_s: Seconds = 45e-6
    """Time of a collective over a small message inside a host; between hosts it takes three times as long.

    Fitted to published runs, where ranks also wait for each other."""
    cache: Positive = 1.17
    """Speed of reading the KV cache in a decoding step, relative to that of reading weights.

    Measured kernels of vLLM 0.24 on H100, H200 and B200 reach 0.88 to 0.9 of the bandwidth with the cache and 0.66 to
    0.84 with weights (aiconfigurator-core 0.12, benchmarks/serving_times.py, also of the next three)."""
    decode_layer_s: Seconds = 24e-6
    """Time of a layer in a decoding step with CUDA graphs, besides moving bytes: 10 to 25 us for attention, 9 for
    norms and activations. Experts have half as much again."""
    prefill_layer_s: Seconds = 80e-6
    """The same for a batch of prompts."""
    decode_message_s: Seconds = 12e-6
    """Time of an all-reduce in a decoding step besides its bytes: 5 to 8 us for one sequence and 10 to 26 us for 32."""
    eager_layer_s: Seconds = 0.2e-3
    """Least time of a layer in a decoding step without CUDA graphs: Python launches about 15 kernels, each in 10 to 15
    microseconds."""
    decode_step_s: Seconds = 6e-3
    """Host time of a decoding step: scheduling, input, sampling.

    With it a step of 512 sequences of a model of 0.5B takes 14 ms on an H200, where 17 to 18 were measured
    (benchmarks/RESULTS.md, "On a GPU")."""
    decode_sequence_s: Seconds = 10e-6
    """Host time of each sequence in a decoding step: its sampling parameters, its token, its text."""
    train_layer_s: Seconds = 0.5e-3
    """Least time of a layer's forward pass, to launch its kernels; the backward pass takes twice as long.

    With adapters there are 2.3 times as many."""
    expert_layer_s: Seconds = 3e-3
    """Least time of a layer's experts: routing, permutation, and the host's waiting for their numbers of tokens.

    Published steps of Qwen3-30B-A3B on Megatron take 3 to 5 ms for each layer, on H100 and on GB200."""
    pass_sample_s: Seconds = 0.0
    """Host time of each sample in a pass or a generation besides its tokens: packing, seeds, texts."""
    call_s: Seconds = 0.0
    """Time of a call of a role besides its work: messages to its workers, results in the object store."""
    host_sample_s: Seconds = 5e-6
    """Time of a sample in a node without a role: the reward ``exact`` takes 5 us and an advantage 1. The time of a
    reward that runs programs or calls a service is not known in advance."""
    sync_s: Seconds = 1.0
    """Time of a weight sync, whatever its size: engines that wake, barriers."""
    turn_s: Seconds = 0.1
    """Time of a role to give up GPU memory that others need, and to take it again, whatever its size: calls, garbage
    collection, waiting for kernels. An estimate; with a full garbage collection it was 0.48 s on one H200."""
    sleep_gib_s: Seconds = 8e-3
    """Time of vLLM to release a GiB of GPU memory and to map it again. A generation of a tiny model took 1.5 s on one
    H200, of which 124 GiB of weights and KV cache took 0.97 s."""
    process_gib: Annotated[float, Ge(0)] = 0.7
    """Host memory of a process without a model: the interpreter with its libraries. Counted on CPUs."""
    peak_tflops: Positive | None = None
    """The best matrix products that were measured, in place of the data sheet's."""
    narrow: Annotated[float, Ge(0)] = 0.0
    """The width of matrices whose products reach half of the speed of wide ones."""
    memory_gb_s: Positive | None = None
    """The measured bandwidth of memory, in place of the data sheet's."""
    link_gb_s: Positive | None = None
    """The measured bandwidth between processes of a host, in place of the data sheet's."""


@dataclass(frozen=True)
class Speed:
    """The speed of one GPU in base units: bytes and floating-point operations per second."""

    flops: float
    bytes: float
    link: float
    network: float
    """A GPU's share of its host's links to other hosts."""
    gpus_per_host: int
    efficiency: Efficiency
    sustained: float = 1.0
    """The share of ``flops`` before heat and power limit them; ``flops`` are those of hours of training."""
    engines: tuple[tuple[str, Efficiency], ...] = ()
    """Efficiencies of single engines, in place of ``efficiency``."""
    is_cpu: bool = False
    """Kernels run one after another with the host's work, which hides none of it."""

    def of_engine(self, engine: str) -> "Speed":
        """Return the speed that an engine reaches."""
        efficiency = dict(self.engines).get(engine)
        return self if efficiency is None else replace(self, efficiency=efficiency)

    @property
    def matmul(self) -> float:
        """Return the operations per second of wide dense matrix products."""
        if self.efficiency.peak_tflops is not None:
            return self.efficiency.matmul * self.flops
        return self.efficiency.matmul / (1 / self.flops + 1 / (_FEED * self.bytes))

    @property
    def burst(self) -> "Speed":
        """Return the speed of work that lasts for seconds, such as reading prompts."""
        return replace(self, flops=self.flops / self.sustained, sustained=1.0)

    def matmul_of(self, width: float) -> float:
        """Return the operations per second of products of a model with hidden states of ``width``."""
        return self.matmul / (1 + self.efficiency.narrow / width)

    @property
    def memory(self) -> float:
        """Return the bytes per second that kernels move from and to memory."""
        return self.bytes * self.efficiency.memory

    def ring(self, gpus: int) -> float:
        """Return the bytes per second through each GPU of a group in a ring or tree.

        The group fills hosts one after another, and every GPU of a host passes its own part on to the next host.
        """
        between = min(self.link, self.network * self.gpus_per_host)
        return (self.link if gpus <= self.gpus_per_host else between) * self.efficiency.link

    def exchange(self, gpus: int) -> float:
        """Return the bytes per second when each GPU sends something else to every other one.

        Data that leaves the host goes through the GPU's own share of the network.
        """
        if gpus <= self.gpus_per_host:
            return self.link * self.efficiency.link
        inside = self.gpus_per_host / gpus
        return self.efficiency.link / max(inside / self.link, (1 - inside) / self.network)

    def dispatch_s(self, gpus: int, experts: int, *, forwards: bool) -> float:
        """Return the seconds to send each byte of a token to the GPUs of its ``experts``, of ``gpus`` that have some.

        ``forwards``: it is sent once to each host, and there to each GPU, that has at least one of them (DeepEP).
        """
        if not forwards:
            return experts * (gpus - 1) / gpus / self.exchange(gpus)
        hosts = max(1.0, gpus / self.gpus_per_host)
        others = (hosts - 1) * (1 - (1 - 1 / hosts) ** experts)
        received = (gpus - 1) * (1 - (1 - 1 / gpus) ** experts)
        return max(received / self.link, others / self.network) / self.efficiency.link

    def message_s(self, gpus: int) -> float:
        """Return the seconds of a collective over a small message."""
        slower = gpus > self.gpus_per_host and self.network < self.link
        return self.efficiency.message_s * (3 if slower else 1)


def gpu_speed(
    gpu: Gpu,
    gpus_per_host: int,
    efficiency: Efficiency,
    dtype: str = "bfloat16",
    *,
    engines: Mapping[str, Efficiency] | None = None,
    share: float = 1.0,
) -> Speed:
    """Return the speed of a kind of GPU. Raises PlacementError where figures for predicting times are missing.

    ``share`` is the part of a CPU that each of several simulated hosts has.
    """
    peaks = gpu.peak_tflops or {}
    peak = efficiency.peak_tflops or peaks.get(dtype) or peaks.get("float32") or peaks.get("float16")
    memory = efficiency.memory_gb_s or gpu.memory_gb_s
    if peak is None or memory is None:
        raise PlacementError(
            "cluster.gpus",
            f"a kind of GPU has no {'peak_tflops' if peak is None else 'memory_gb_s'}",
            fix="add its figures, as the files of conf/gpu have them",
        )
    link = (efficiency.link_gb_s or gpu.link_gb_s or 25.0) * 1e9
    is_cpu = gpu.memory_gib is None
    # Several hosts of CPUs are simulated on one machine.
    network = link if is_cpu and efficiency.link_gb_s else (gpu.network_gb_s or 1.25) * 1e9
    sustained = 1.0 if efficiency.peak_tflops else gpu.sustained
    return Speed(
        flops=share * peak * 1e12 * sustained,
        sustained=sustained,
        bytes=share * memory * 1e9,
        link=link,
        network=network,
        gpus_per_host=gpus_per_host,
        efficiency=efficiency,
        engines=tuple(sorted((engines or {}).items())),
        is_cpu=is_cpu,
    )


def slowest(speeds: Sequence[Speed]) -> Speed:
    """Return what GPUs of several kinds reach together: the slowest in each respect."""
    first = min(speeds, key=lambda speed: speed.matmul)
    return replace(
        first,
        bytes=min(speed.memory for speed in speeds) / first.efficiency.memory,
        link=min(speed.link for speed in speeds),
        network=min(speed.network for speed in speeds),
        gpus_per_host=min(speed.gpus_per_host for speed in speeds),
    )
