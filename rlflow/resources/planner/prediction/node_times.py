"""The predicted times of nodes, with the figures by which speeds are compared: MFU and time per output token."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.task_times import generations
from rlflow.resources.time.work import forward_work, training_passes
from rlflow.resources.workload import Task


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
        )
    return times


def _mfu(inputs: PlannerInputs, result: SearchResult, task: Task, seconds: float) -> float | None:
    role = str(task.role)
    demand, host_set = inputs.demands[role], inputs.host_set([role])
    peak = inputs.cluster.peak_flops([host.name for host in host_set.hosts])
    if demand.architecture is None or peak is None or not seconds:
        return None
    tokens = task.tokens * task.epochs * task.computed_share
    passes = training_passes(adapters=demand.training.lora is not None)
    operations = passes * forward_work(demand.architecture).flops(tokens, task.typical_length)
    return operations / (seconds * result.roles[role].layout.num_gpus * peak)


def _token_seconds(inputs: PlannerInputs, result: SearchResult, task: Task) -> float | None:
    role = str(task.role)
    demand, choice = inputs.demands[role], result.candidate.choices[role]
    if demand.architecture is None:
        return None
    speed = inputs.host_set([role]).speed.of_engine(demand.engine)
    first = generations(demand, task, choice.layout, speed, choice.kv_tokens)[0]
    return first.concurrency / first.engine_tokens_per_second
