"""The predicted times of nodes, and of evaluations and checkpoints, in which training pauses.

Nodes have the figures by which speeds are compared: MFU and time per output token.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.resources.demand import Demand
from rlflow.resources.models.lora import adapter_parameters, spares_gradients
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.task_times import host_task_seconds, task_generation, task_seconds
from rlflow.resources.time.work import forward_work, training_passes
from rlflow.resources.workload import Task

# Bytes per second that a run writes to disk, reads again for their digest, and flushes. An estimate for one NVMe disk;
# the files of all hosts usually end on one file system.
_CHECKPOINT_RATE = 5e8
# Bytes of weights and of Adam's two moments of each trained parameter, all in fp32.
_SAVED_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """The predicted time of a node."""

    start: float
    seconds: float
    critical: bool
    """The node is on the critical path of the step."""
    mfu: float | None = None
    """Model FLOPs utilization of a node that trains, on GPUs: the operations of its forward and backward pass, without
    recomputation, as a share of what its GPUs do at their peak."""
    token_seconds: float | None = None
    """The time between two tokens of a response while an engine generates as many responses as it can at once."""
    cpu_cores: Mapping[str, float] | None = None
    """The CPU cores that the agents of a node keep busy on each host, besides engines."""


def node_times(inputs: PlannerInputs, result: SearchResult) -> Mapping[str, NodeTime]:
    """Return the time of each node."""
    tasks = {task.node: task for task in inputs.workload.tasks}
    schedule = result.candidate.schedule
    times = {}
    for span in schedule.spans:
        task = tasks.get(span.node)
        times[span.node] = NodeTime(
            start=span.start,
            seconds=span.seconds,
            critical=span.node in schedule.critical_path,
            mfu=_mfu(inputs, result, task, span.seconds) if task and task.kind == "update" else None,
            token_seconds=_token_seconds(inputs, result, task) if task and task.kind == "generate" else None,
            cpu_cores=_cpu_cores(result, task, span.seconds) if task and task.turns.cpu_s and span.seconds else None,
        )
    return times


def _mfu(inputs: PlannerInputs, result: SearchResult, task: Task, seconds: float) -> float | None:
    role = str(task.role)
    demand, host_set = inputs.demands[role], inputs.host_set([role])
    peak = inputs.cluster.peak_flops([host.name for host in host_set.hosts])
    if demand.architecture is None or peak is None or not seconds:
        return None
    tokens = task.tokens * task.epochs * task.computed_share
    passes = training_passes(adapters=spares_gradients(demand.training.lora))
    operations = passes * forward_work(demand.architecture).flops(tokens, task.typical_length)
    return operations / (seconds * result.roles[role].layout.num_gpus * peak)


def _token_seconds(inputs: PlannerInputs, result: SearchResult, task: Task) -> float | None:
    role = str(task.role)
    demand, choice = inputs.demands[role], result.candidate.choices[role]
    if demand.architecture is None:
        return None
    speed = inputs.host_set([role]).speed.of_engine(demand.engine)
    planned = inputs.workload.at_once(task, result.candidate.pool_roles(role))
    return task_generation(demand, planned, choice.layout, speed, choice.kv_tokens).token_seconds


def _cpu_cores(result: SearchResult, task: Task, seconds: float) -> Mapping[str, float] | None:
    """Return the cores by host, each with its share of a generating role; None for other tasks."""
    if task.kind != "generate":
        return None
    bundles = Counter(bundle.host for bundle in result.roles[str(task.role)].bundles)
    cores = task.samples * task.turns.count * task.turns.cpu_s / seconds
    return {host: cores * count / bundles.total() for host, count in sorted(bundles.items())}


def evaluation_seconds(inputs: PlannerInputs, result: SearchResult) -> float:
    """Return the time of one evaluation, whose nodes run one after another; zero without evaluations."""
    seconds = 0.0
    for task in inputs.workload.evaluation:
        if task.role is None:
            speed = inputs.host_set([next(iter(inputs.demands))]).speed
            seconds += host_task_seconds(task, inputs.demands.values(), speed)
            continue
        choice = result.candidate.choices[task.role]
        speed = inputs.host_set([task.role]).speed
        times = task_seconds(inputs.demands[task.role], [task], choice.layout, speed, kv_tokens=choice.kv_tokens)
        seconds += times[task.node]
    return seconds


def checkpoint_seconds(inputs: PlannerInputs) -> float:
    """Return the time to write the state of all trained roles; of a role with adapters that is the adapters'."""
    saved = sum(_trained_parameters(demand) for demand in inputs.demands.values() if demand.job == "train")
    return saved * _SAVED_BYTES / _CHECKPOINT_RATE


def _trained_parameters(demand: Demand) -> int:
    if demand.architecture is None:
        return 0
    lora = demand.training.lora
    return demand.architecture.num_parameters if lora is None else adapter_parameters(demand.architecture, lora)
