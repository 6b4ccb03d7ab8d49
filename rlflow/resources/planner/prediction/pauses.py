"""The time of evaluations and checkpoints, in which training pauses."""

from rlflow.resources.demand import Demand
from rlflow.resources.models.lora import adapter_parameters
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.task_times import host_task_seconds, task_seconds

# Bytes per second that a run writes to disk, reads again for their digest, and flushes. An estimate for one NVMe disk;
# the files of all hosts usually end on one file system.
_CHECKPOINT_RATE = 5e8
# Bytes of weights and of Adam's two moments of each trained parameter, all in fp32.
_SAVED_BYTES = 12


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
