"""How a role may use the GPUs of its pool: memory is checked first, then time is predicted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload
from rlflow.resources.memory import (
    EngineMemory,
    Terms,
    asleep_terms,
    generate_memory,
    score_terms,
    state_terms,
    update_terms,
)
from rlflow.resources.model import Architecture
from rlflow.resources.site import Site
from rlflow.resources.time import generation, scoring, training
from rlflow.resources.workload import Task

MAX_MICRO_BATCH_TOKENS = 65536
# What vLLM lets a batch hold on GPUs of 70 GiB and more (EngineArgs.get_batch_defaults).
MAX_NUM_SEQS = 1024
_CPU_MICRO_BATCH_TOKENS = 2048
_MAX_UTILIZATION = 0.9
# Between a GPU and its host's memory, by PCIe 4.0 x16 or better, in bytes a second.
_HOST_LINK = 25e9
_ENGINE_WAKES_S = 2.0
_KEPT_IN_SYNC = {"weights", "gradients", "optimizer", "gathered", "graphs", "nccl", "context"}


@dataclass(frozen=True)
class Policy:
    """What the roles of a pool have in common: what stays on its GPUs while others work."""

    sleeps: bool = False
    """Trained and scoring roles put their state into the host's memory."""
    zero_stage: int = 3
    """Of trained roles."""
    offload: Offload = "none"
    """Of trained roles; ``weights`` of scoring ones too."""
    shards_scorers: bool = True
    """Models that only score are sharded too, instead of being whole on every GPU."""


@dataclass(frozen=True)
class Pool:
    """Roles that use the same GPUs, one after another."""

    demands: tuple[Demand, ...]
    gpus: int
    groups: Callable[[int], int]
    """So many groups of a size, each inside a host, the pool's GPUs make."""
    site: Site
    largest_group: int

    @property
    def shared(self) -> bool:
        return len(self.demands) > 1


@dataclass(frozen=True)
class Choice:
    layout: Layout
    phase: str
    """In which it needs most: generate, score or update."""
    awake: Terms
    """GiB of each of its GPUs in that phase."""
    resting: Terms
    """While others on its GPUs work."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each of its nodes."""
    kv_tokens: float | None = None
    """That one engine has room for."""
    concurrency: float | None = None
    """Sequences that one engine writes at once."""

    @property
    def sync(self) -> Terms:
        """While weights are handed over: without activations, logits, and keys and values."""
        return {term: gib for term, gib in self.awake.items() if term in _KEPT_IN_SYNC}


@dataclass(frozen=True)
class Shortage:
    """Nothing fits: what came nearest lacks so much."""

    role: str
    gib: float
    what: str

    def __str__(self) -> str:
        return f"{self.role}: {self.what}"


def resting_terms(demand: Demand, policy: Policy, pool: Pool) -> Terms:
    """What the role keeps on its GPUs while others work."""
    if not pool.shared or demand.architecture is None or pool.site.memory_gib is None:
        return {}
    if demand.generates and not demand.trains:
        return asleep_terms("tensor" in demand.parallel)
    layout = static_layout(demand, policy, pool)
    if layout.sleeps:
        return asleep_terms(False)
    if demand.trains:
        return asleep_terms(False) | state_terms(demand.architecture, layout, demand.training)
    weights = score_terms(demand.architecture, layout, 0, weight_bytes=demand.weight_bytes)["weights"]
    return asleep_terms(False) | {"weights": weights}


def host_gib(demand: Demand, choice: Choice) -> float:
    """Of host memory for each of the role's GPUs: what is offloaded, and what sleeps there."""
    if demand.architecture is None:
        return 0.0
    layout = choice.layout
    kept = 0.0
    if demand.trains:
        everything = sum(state_terms(demand.architecture, replace(layout, offload="none"), demand.training).values())
        on_gpu = sum(state_terms(demand.architecture, layout, demand.training).values())
        kept = everything if layout.sleeps else everything - on_gpu
    elif layout.sleeps and not demand.generates:
        kept = score_terms(demand.architecture, layout, 0, weight_bytes=demand.weight_bytes)["weights"]
    return kept


def choose(demand: Demand, tasks: Sequence[Task], policy: Policy, pool: Pool, available: float) -> Choice | Shortage:
    """The fastest way with ``available`` GiB a GPU, or what is lacking."""
    if demand.trains:
        found = _trainers(demand, tasks, policy, pool, available)
    elif demand.generates:
        found = _generators(demand, tasks, policy, pool, available)
    else:
        found = _scorers(demand, tasks, policy, pool, available)
    options = list(found)
    fitting = [option for option in options if isinstance(option, Choice)]
    if fitting:
        # Of equally fast ones the first: less tensor, less sequence parallelism.
        return min(fitting, key=lambda choice: sum(choice.seconds.values()))
    lacking = [option for option in options if isinstance(option, Shortage)]
    no_way = Shortage(demand.role, float("inf"), f"its degrees do not go into {pool.gpus} GPUs")
    return min(lacking, key=lambda shortage: shortage.gib, default=no_way)


def static_layout(demand: Demand, policy: Policy, pool: Pool) -> Layout:
    """Without what depends on the memory left."""
    wants = demand.wants
    spread = "data" in demand.parallel
    stage = policy.zero_stage if demand.trains else (3 if policy.shards_scorers else 0)
    size = (demand.pinned("tensor_parallel_size") or 1) * (demand.pinned("pipeline_parallel_size") or 1)
    sequence = demand.pinned("sequence_parallel_size") or 1
    copies = demand.pinned("data_parallel_size") or max(1, pool.groups(size) // sequence)
    # Nothing but weights can be offloaded of a model that only scores.
    offload: Offload = policy.offload if demand.trains or policy.offload == "weights" else "none"
    return Layout(
        tensor_parallel_size=demand.pinned("tensor_parallel_size") or 1,
        pipeline_parallel_size=demand.pinned("pipeline_parallel_size") or 1,
        data_parallel_size=copies,
        sequence_parallel_size=sequence,
        zero_stage=(stage if wants.zero_stage == "auto" else wants.zero_stage) if spread else None,
        offload=(offload if wants.offload == "auto" else wants.offload) if spread else None,
        micro_batch_tokens=_CPU_MICRO_BATCH_TOKENS,
        sleeps=policy.sleeps and pool.shared and spread and not demand.generates,
    )


def _sequence_layouts(demand: Demand, policy: Policy, pool: Pool) -> Iterator[Layout]:
    """Sequence parallelism by powers of two that divide the heads and lie inside a host (Jacobs et al. 2023)."""
    static = static_layout(demand, policy, pool)
    if demand.pinned("sequence_parallel_size") is not None or demand.architecture is None:
        yield static
        return
    model = demand.architecture
    size = 1
    while size <= pool.largest_group and model.num_attention_heads % size == 0:
        copies = demand.pinned("data_parallel_size") or pool.groups(size) // static.model_parallel_size
        if copies >= 1:
            yield replace(static, sequence_parallel_size=size, data_parallel_size=copies)
        size *= 2


def _trainers(
    demand: Demand, tasks: Sequence[Task], policy: Policy, pool: Pool, available: float
) -> Iterator[Choice | Shortage]:
    model = demand.architecture
    resting = resting_terms(demand, policy, pool)
    for layout in _sequence_layouts(demand, policy, pool):
        if layout.num_gpus > pool.gpus:
            continue
        pinned = demand.wants.gradient_checkpointing
        on_gpu = pool.site.memory_gib is not None
        for saves in (False, True) if pinned == "auto" and on_gpu else (pinned is True,):
            tried = replace(layout, gradient_checkpointing=saves)

            def terms(tokens: float, tried: Layout = tried) -> Terms:
                return update_terms(model, tried, demand.training, tokens) if model and on_gpu else {}

            sized = _micro_batch(demand, tasks, tried, terms, available)
            if isinstance(sized, Shortage):
                yield sized
                continue
            seconds = _seconds(demand, tasks, sized, pool)
            if model is not None and sized.sleeps:
                _add_switching(seconds, tasks, sum(state_terms(model, sized, demand.training).values()))
            longest = max((task.longest for task in tasks), default=1)
            yield Choice(sized, "update", terms(max(longest, sized.micro_batch_tokens)), resting, seconds)


def _scorers(
    demand: Demand, tasks: Sequence[Task], policy: Policy, pool: Pool, available: float
) -> Iterator[Choice | Shortage]:
    model = demand.architecture
    on_gpu = pool.site.memory_gib is not None
    for layout in _sequence_layouts(demand, policy, pool):
        if layout.num_gpus > pool.gpus:
            continue

        def terms(tokens: float, layout: Layout = layout) -> Terms:
            return score_terms(model, layout, tokens, weight_bytes=demand.weight_bytes) if model and on_gpu else {}

        sized = _micro_batch(demand, tasks, layout, terms, available)
        if isinstance(sized, Shortage):
            yield sized
            continue
        seconds = _seconds(demand, tasks, sized, pool)
        if sized.sleeps:
            _add_switching(seconds, tasks, terms(0).get("weights", 0.0))
        longest = max((task.longest for task in tasks), default=1)
        peak = terms(max(longest, sized.micro_batch_tokens))
        yield Choice(sized, "score", peak, resting_terms(demand, policy, pool), seconds)


def _add_switching(seconds: dict[str, float], tasks: Sequence[Task], moved_gib: float) -> None:
    """To the first of the tasks: its state comes from the host, and goes back after the last."""
    if tasks:
        seconds[tasks[0].node] += 2 * moved_gib * 2**30 / _HOST_LINK


def _micro_batch(
    demand: Demand, tasks: Sequence[Task], layout: Layout, terms: Callable[[float], Terms], available: float
) -> Layout | Shortage:
    """As many tokens as fit, and no more than the role ever has at once; never less than the longest sequence."""
    longest = max((task.longest for task in tasks), default=1)
    pinned = demand.wants.micro_batch_tokens
    if available == float("inf"):
        return replace(layout, micro_batch_tokens=_CPU_MICRO_BATCH_TOKENS if pinned == "auto" else pinned)
    needed = longest if pinned == "auto" else max(longest, pinned)
    least = sum(terms(needed).values())
    if least > available:
        empty = sum(terms(0).values())
        what = (
            f"{empty:.0f} GiB before the first token" if empty > available else f"{least:.0f} GiB for {needed} tokens"
        )
        return Shortage(demand.role, least - available, f"{what}, of {available:.0f} GiB")
    if pinned != "auto":
        return replace(layout, micro_batch_tokens=pinned)
    ranks = max(1, layout.data_parallel_size)
    useful = max((ceil(task.tokens * task.epochs / task.minibatches / ranks) for task in tasks), default=longest)
    most = min(MAX_MICRO_BATCH_TOKENS, max(longest, useful))
    return replace(layout, micro_batch_tokens=most_tokens(terms, longest, most, available))


def most_tokens(terms: Callable[[float], Terms], fits: int, most: int, available: float) -> int:
    """Tokens that fit, where ``fits`` do: ``most``, or nearly as many as do, in whole thousands beyond ``fits``.

    What is needed is a maximum of linear functions of the tokens, so it lies below a line between two of its points.
    """
    low, needed_low = fits, sum(terms(fits).values())
    high, needed_high = most, sum(terms(most).values())
    if needed_high <= available:
        return most
    for _ in range(2):
        low += floor((high - low) * (available - needed_low) / (needed_high - needed_low))
        needed_low = sum(terms(low).values())
    return max(fits, low // 1024 * 1024)


def _generators(
    demand: Demand, tasks: Sequence[Task], policy: Policy, pool: Pool, available: float
) -> Iterator[Choice | Shortage]:
    resting = resting_terms(demand, policy, pool)
    for tensor, stages in _groups(demand, pool):
        copies = demand.pinned("data_parallel_size") or pool.groups(tensor) // stages
        if copies < 1 or pool.groups(tensor) < stages * copies:
            continue
        layout = Layout(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            data_parallel_size=copies,
            micro_batch_tokens=_CPU_MICRO_BATCH_TOKENS
            if demand.wants.micro_batch_tokens == "auto"
            else demand.wants.micro_batch_tokens,
        )
        if demand.architecture is None or pool.site.memory_gib is None:
            yield Choice(layout, "generate", {}, resting, _seconds(demand, tasks, layout, pool, float("inf")))
            continue
        served = _served(demand, tasks, layout, pool.site.memory_gib, demand.architecture, available)
        if isinstance(served, Shortage):
            yield served
            continue
        layout, memory = served
        seconds = _seconds(demand, tasks, layout, pool, memory.kv_tokens)
        if pool.shared and tasks:
            seconds[tasks[0].node] += _ENGINE_WAKES_S
        typical = max((task.typical_length for task in tasks), default=1.0)
        each = max((task.samples / copies for task in tasks), default=1.0)
        concurrency = min(each, MAX_NUM_SEQS, memory.kv_tokens / typical)
        yield Choice(layout, "generate", memory.terms, resting, seconds, memory.kv_tokens, concurrency)


def _groups(demand: Demand, pool: Pool) -> Iterator[tuple[int, int]]:
    """Tensor- and pipeline-parallel sizes: pinned, or powers of two that divide the heads."""
    heads = demand.architecture.num_attention_heads if demand.architecture else 1
    pinned = demand.pinned("tensor_parallel_size")
    sizes = [pinned] if pinned else [2**n for n in range(10) if 2**n <= pool.largest_group and heads % 2**n == 0]
    stages = demand.pinned("pipeline_parallel_size")
    yield from ((size, stages or 1) for size in sizes)
    if stages is None:
        # More GPUs than a host's, only where one host has no room.
        yield from ((sizes[-1], count) for count in (2, 4, 8))


def _served(
    demand: Demand, tasks: Sequence[Task], layout: Layout, memory_gib: float, model: Architecture, available: float
) -> tuple[Layout, EngineMemory] | Shortage:
    """With ``gpu_memory_utilization`` as pinned, or all that is left, in steps of 0.05."""
    wanted = demand.wants.gpu_memory_utilization
    left = min(_MAX_UTILIZATION, floor(available / memory_gib * 20 + 1e-9) / 20)
    share = left if wanted == "auto" else wanted
    groups = f"tp {layout.tensor_parallel_size}"
    if share <= 0 or share * memory_gib > available + 1e-9:
        lacking = share * memory_gib - available
        return Shortage(
            demand.role, lacking, f"gpu_memory_utilization {share:g} is more than the {left:g} that is left"
        )
    layout = replace(layout, gpu_memory_utilization=share)
    memory = generate_memory(model, layout, memory_gib, max_num_seqs=MAX_NUM_SEQS, weight_bytes=demand.weight_bytes)
    longest = max((task.longest for task in tasks), default=1)
    if memory.kv_tokens < longest:
        rest = sum(gib for term, gib in memory.terms.items() if term != "kv")
        room = f"no room for keys and values of {longest} tokens" if rest < share * memory_gib else f"{rest:.0f} GiB"
        return Shortage(demand.role, rest - share * memory_gib, f"{groups}: {room} with {share * memory_gib:.0f} GiB")
    return layout, memory


def _seconds(
    demand: Demand, tasks: Sequence[Task], layout: Layout, pool: Pool, kv_tokens: float = float("inf")
) -> dict[str, float]:
    """Of each task; none for a model without figures."""
    model, speed = demand.architecture, pool.site.speed
    if model is None:
        return {task.node: 0.0 for task in tasks}
    seconds = {}
    for task in tasks:
        if task.kind == "generate":
            engines = layout.data_parallel_size
            each = ceil(ceil(task.samples / task.group_size) / engines) * task.group_size
            seconds[task.node] = generation(
                model,
                layout,
                speed,
                sequences=min(task.samples, each),
                group_size=task.group_size,
                prompts=task.prompts,
                responses=task.responses,
                kv_tokens=kv_tokens,
            ).seconds
        elif task.kind == "update":
            seconds[task.node] = training(
                model,
                layout,
                speed,
                tokens=task.tokens * task.epochs,
                length=task.typical_length,
                minibatches=task.minibatches,
            ).seconds
        else:
            seconds[task.node] = scoring(model, layout, speed, tokens=task.tokens, length=task.typical_length).seconds
    return seconds
