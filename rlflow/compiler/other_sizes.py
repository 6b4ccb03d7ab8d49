"""The placement of a plan with other sizes: memory and step time for other responses, batches and groups."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from rlflow.compiler.models import model_architecture
from rlflow.compiler.plan import Plan
from rlflow.compiler.problem import Problem
from rlflow.compiler.wire import wire
from rlflow.errors import UserError
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Bundle, Layout, RolePlacement, Worker
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.confidence import Verdict
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Shortage
from rlflow.resources.planner.prediction.partition_times import PartitionTimes
from rlflow.resources.planner.prediction.prediction import predict
from rlflow.resources.planner.prediction.risks import gpu_risks
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.workload import Workload

# Factors of the recipe's own sizes.
_RESPONSES = (0.25, 0.5, 1.0, 2.0, 4.0)
_OTHERS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class SizeAxis:
    """A size of a recipe, and the values that are predicted."""

    key: str
    """Its path in the recipe."""
    values: tuple[int, ...]
    """Ascending; the recipe's own value is one of them."""
    own: int
    """The index of the recipe's value."""


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """The prediction for one combination of sizes."""

    sizes: tuple[int, ...]
    """One value of each axis."""
    reason: str = ""
    """Why these sizes do not fit, or are tight."""
    verdict: Verdict | None = None
    step_seconds: float | None = None
    """None: these sizes do not fit."""
    step_seconds_range: tuple[float, float] | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_gib: Mapping[str, float] | None = None
    """The memory of each role on its fullest GPU, with what idle roles hold there."""


def size_axes(plan: Plan) -> tuple[SizeAxis, ...]:
    """Return the sizes of a plan's recipe that may be changed: responses and groups where one node generates.

    Generation ahead of training is simulated, which takes a tenth of a second, so that only its responses change.
    """
    recipe = plan.recipe
    axes = [_axis("data.batch_size", recipe.data.batch_size, (1.0,) if plan.workload.ahead else _OTHERS)]
    if (node := _generator(plan)) is not None:
        sampling = node.operation.sampling
        assert sampling is not None
        model = model_architecture(recipe.models[recipe.roles[str(node.role)].model])
        prompt = sampling.longest_sequence(recipe.data.max_prompt_tokens) - sampling.max_tokens
        limit = model.max_position_embeddings - prompt if model else None
        axes.insert(0, _axis(f"graph.{node.name}.max_tokens", sampling.max_tokens, _RESPONSES, limit=limit))
        if sampling.group_size > 1 and not plan.workload.ahead:
            axes.append(_axis(f"graph.{node.name}.group_size", sampling.group_size, _OTHERS, least=2))
    return tuple(axis for axis in axes if len(axis.values) > 1)


def size_points(plan: Plan, axes: tuple[SizeAxis, ...]) -> Iterator[SizePoint]:
    """Yield the prediction for each combination of sizes, the last axis fastest.

    All roles keep their GPUs, degrees and micro-batches. A micro-batch grows where one sequence has more tokens.
    """
    gpus = _Gpus.of(plan)
    for sizes in product(*(axis.values for axis in axes)):
        recipe = plan.recipe
        for axis, value in zip(axes, sizes, strict=True):
            recipe = _with_size(recipe, axis, value)
        try:
            yield _point(plan, gpus, recipe, sizes)
        except UserError as error:
            yield SizePoint(sizes=sizes, reason=f"{error.path}: {error.fact}")


@dataclass(frozen=True)
class _Gpus:
    """The GPUs of a plan, reduced to what the prediction of other sizes needs."""

    counts: tuple[tuple[int, ...], ...]
    """For each pool, its number of GPUs on each of its hosts."""
    examples: Mapping[str, Worker]
    """For each role one GPU for every set of roles that share a GPU, since all GPUs with the same roles are alike."""

    @classmethod
    def of(cls, plan: Plan) -> "_Gpus":
        """Return the GPUs of a plan."""
        roles_on: dict[Bundle, set[str]] = {}
        for role, placement in plan.roles.items():
            for bundle in placement.bundles:
                roles_on.setdefault(bundle, set()).add(role)
        pools = [
            Counter(bundle.host for bundle, roles in roles_on.items() if not roles.isdisjoint(pool.roles))
            for pool in plan.prediction.pools
        ]
        alike = {frozenset(roles): bundle for bundle, roles in roles_on.items()}
        examples = {
            role: Worker(tuple(bundle for roles, bundle in alike.items() if role in roles)) for role in plan.roles
        }
        return cls(tuple(tuple(pool.values()) for pool in pools), examples)


def _point(plan: Plan, gpus: _Gpus, recipe: Recipe, sizes: tuple[int, ...]) -> SizePoint:
    """Predict a recipe with a plan's layouts. Raises UserError for sizes that no cluster can run."""
    needs = Problem(recipe, wire(recipe), plan.cluster, plan.calibration).requirements()
    demands = [_pinned(demand, plan.roles[demand.role].layout, needs.workload) for demand in needs.demands]
    inputs = PlannerInputs.of(demands, needs.workload, plan.cluster, plan.calibration)
    cache = PoolCache(inputs)
    partition = tuple(pool.roles for pool in plan.prediction.pools)
    uses = []
    for roles, counts in zip(partition, gpus.counts, strict=True):
        use = cache.on_hosts(roles, counts)
        if isinstance(use, Shortage):
            return SizePoint(sizes=sizes, reason=str(use))
        # A search does not know the width of an idle engine yet, and its plan has the widest one's memory.
        idle = {role: plan.prediction.memory[role].phases.get("resting", {}) for role in roles}
        choices = {role: replace(choice, idle=idle[role]) for role, choice in use.choices.items()}
        uses.append(replace(use, choices=choices))
    candidate = PartitionTimes(inputs, partition).candidate(tuple(map(sum, gpus.counts)), uses)
    placed = {
        role: RolePlacement(choice.layout, (gpus.examples[role],)) for role, choice in sorted(candidate.choices.items())
    }
    result = SearchResult(candidate, placed, (), ())
    predicted = predict(inputs, result)
    # A few GPUs stand for all, so that the need of a host is unknown.
    hosts = "offloaded and sleeping roles need host memory that the cluster does not state (memory_gib)"
    tight = "; ".join(gpu_risks(inputs, result)) or hosts
    peaks = {
        role: [gib for on_host in memory.peak_gib.values() for gib in on_host.values()]
        for role, memory in predicted.memory.items()
    }
    return SizePoint(
        sizes=sizes,
        reason=tight if predicted.verdict is Verdict.TIGHT else "",
        verdict=predicted.verdict,
        step_seconds=predicted.step_seconds,
        step_seconds_range=predicted.step_seconds_range,
        tokens_per_second_per_gpu=predicted.tokens_per_second_per_gpu * predicted.num_gpus / plan.prediction.num_gpus,
        peak_gib={role: max(of_role) for role, of_role in peaks.items() if of_role},
    )


def _pinned(demand: Demand, layout: Layout, workload: Workload) -> Demand:
    """Return the demand with a layout as its pins, whose micro-batch has room for the longest sequence."""
    passes = (task for task in workload.of(demand.role) if task.kind != "generate" and task.is_expected)
    tokens = max((task.longest for task in passes), default=0)
    pins = replace(demand.pins, micro_batch_tokens=max(tokens, layout.micro_batch_tokens))
    for name in ("tensor", "pipeline", "data", "sequence", "expert"):
        if name in demand.parallel:
            field = f"{name}_parallel_size"
            pins = replace(pins, **{field: getattr(layout, field)})
    is_sharded_by_torch = "replicate" in demand.parallel
    for field in ("num_replicas",) if is_sharded_by_torch else ("zero_stage", "offload"):
        if (value := getattr(layout, field)) is not None:
            pins = replace(pins, **{field: value})
    return replace(
        demand,
        pins=replace(pins, gradient_checkpointing=layout.gradient_checkpointing, kept_layers=layout.kept_layers),
    )


def _generator(plan: Plan) -> GraphNode | None:
    """Return the node that generates; None where there are several or none."""
    generators = [node for node in plan.graph.nodes if node.operation.sampling and node.role]
    return generators[0] if len(generators) == 1 else None


def _axis(key: str, planned: int, factors: tuple[float, ...], least: int = 1, limit: int | None = None) -> SizeAxis:
    values = {max(least, round(planned * factor)) for factor in factors}
    values = {min(value, limit) for value in values} if limit is not None else values
    ordered = sorted(values | {planned})
    return SizeAxis(key=key, values=tuple(ordered), own=ordered.index(planned))


def _with_size(recipe: Recipe, axis: SizeAxis, value: int) -> Recipe:
    """Return the recipe with another size. Expected responses grow with the longest ones."""
    section, name, option = ("data", "", "batch_size") if axis.key == "data.batch_size" else axis.key.split(".")
    if section == "data":
        return replace(recipe, data=replace(recipe.data, batch_size=value))
    expect, factor = recipe.expect.response_tokens, value / axis.values[axis.own]
    if option == "max_tokens" and not isinstance(expect, str):
        scaled = tuple(factor * length for length in expect) if isinstance(expect, tuple) else factor * expect
        recipe = replace(recipe, expect=replace(recipe.expect, response_tokens=scaled))
    return replace(recipe, graph={**recipe.graph, name: {**recipe.graph[name], option: value}})
