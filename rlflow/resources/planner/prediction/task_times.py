"""The seconds that a role's tasks take in a layout."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.state import Terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import adapter_parameters, adapter_tensors, spares_gradients
from rlflow.resources.planner.pools import Pool, RoleChoice
from rlflow.resources.time.decoding import Generation, Requests, generation
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.passes import (
    MIN_COMPILED_WIDTH,
    SYNC_TENSOR_S,
    Kernels,
    PassBatch,
    host_seconds,
    offload_seconds,
    scoring,
    sync_seconds,
    training,
)
from rlflow.resources.time.speed import Efficiency, Speed
from rlflow.resources.workload import Task, Workload

# vLLM's default for a batch on GPUs of 70 GiB and more (EngineArgs.get_batch_defaults).
MAX_NUM_SEQS = 1024
# Bytes for each logit of the compiled output layer, and for each value of a hidden state besides, in training and in
# scoring, counted by ``benchmarks.update_budgets``: 16.2 and 22.9 with 896 and 3,584 values in training, 4.3 and 5.4 in
# scoring. Gradients of hidden states are added up tile by tile, so that wide states take more.
_TRAINED_LOGIT_BYTES, _SCORED_LOGIT_BYTES = (14.0, 2.47e-3), (4.0, 3.8e-4)
DEFAULT_NUM_SEQS = 256
"""Sequences that an engine generates at once where its memory is not planned."""


def task_seconds(
    demand: Demand, tasks: Sequence[Task], layout: Layout, speed: Speed, *, kv_tokens: float
) -> dict[str, float]:
    """Return the seconds of each node of a role, whose engines have a KV cache of ``kv_tokens`` each.

    A model without figures takes no time.
    """
    if demand.architecture is None:
        return {task.node: 0.0 for task in tasks}
    speed = speed.of_engine(demand.engine)
    return {task.node: _seconds_of(demand, task, layout, speed, kv_tokens) for task in tasks}


def with_turn(choice: RoleChoice, demand: Demand, pool: Pool) -> RoleChoice:
    """Add the time of a role's turn to its first node, if it takes turns with the others of its pool."""
    first = next(iter(choice.seconds), None)
    if first is None or not pool.takes_turns(choice.layout):
        return choice
    seconds = turn_seconds(demand, choice.layout, choice.awake, pool.host_set.speed.of_engine(demand.engine).efficiency)
    return replace(choice, seconds={**choice.seconds, first: choice.seconds[first] + seconds})


def turn_seconds(demand: Demand, layout: Layout, awake: Terms, efficiency: Efficiency) -> float:
    """Return the time in which a role gives up GPU memory for others, once in a step, and takes it again.

    The state of a role that trains or scores, and sleeps, moves to the host and back. That of an engine is discarded.
    """
    if not layout.sleeps:
        return efficiency.turn_s
    state = sum(awake.get(term, 0.0) for term in ("weights", "gradients", "optimizer", "kv"))
    moved_s = efficiency.sleep_gib_s * state if demand.job == "serve" else 2 * offload_seconds(state * GIB)
    return efficiency.turn_s + moved_s


def _seconds_of(demand: Demand, task: Task, layout: Layout, speed: Speed, kv_tokens: float) -> float:
    """Return the time of a task: its calls, the host's work for each sample, and the model's work."""
    calls = task.minibatches if task.kind == "update" else 1
    sample_s = task.samples * task.epochs / layout.data_parallel_size * speed.efficiency.pass_sample_s
    return calls * speed.efficiency.call_s + sample_s + _work_seconds(demand, task, layout, speed, kv_tokens)


def _work_seconds(demand: Demand, task: Task, layout: Layout, speed: Speed, kv_tokens: float) -> float:
    model = demand.architecture
    assert model is not None
    if task.kind == "generate":
        return task_generation(demand, task, layout, speed, kv_tokens).seconds / task.steps
    epochs, minibatches = (task.epochs, task.minibatches) if task.kind == "update" else (1, 1)
    batch = PassBatch(
        tokens=task.tokens * epochs,
        length=task.typical_length,
        computed=task.computed_share,
        minibatches=minibatches,
        image_tokens=task.samples / task.group_size * epochs * task.image_tokens,
        tokens_per_image=task.image_tokens,
    )
    predict = training if task.kind == "update" else scoring
    return predict(model, layout, speed, batch, engine_kernels(demand, layout, speed)).seconds


def engine_kernels(demand: Demand, layout: Layout, speed: Speed) -> Kernels:
    """Return how rlflow's engines compute passes: on GPUs the output layer is compiled, and layers where that pays.

    Layers are not compiled under DeepSpeed's ZeRO 3, with experts or tensor parallelism, in small models, without a
    kernel for segments (in float32), and by engines that only score.
    """
    model = demand.architecture
    assert model is not None
    value_bytes, gradient_bytes = demand.weight_bytes, demand.training.gradients
    kernels = Kernels(
        value_bytes=value_bytes,
        gradient_bytes=gradient_bytes,
        adapters=spares_gradients(demand.training.lora),
        trains_vision=demand.training.trains_vision,
        muon=demand.training.muon,
    )
    if speed.is_cpu:
        return kernels
    is_trainer = "sequence" in demand.parallel
    is_gathered = layout.zero_stage == 3 and layout.num_replicas is None
    is_plain = not (model.num_experts or is_gathered or layout.tensor_parallel_size > 1)
    pays = model.hidden_size >= MIN_COMPILED_WIDTH and is_plain
    return replace(
        kernels,
        fused_layers=is_trainer and pays and value_bytes == 2,
        logit_bytes=(_logit_bytes(model, *_TRAINED_LOGIT_BYTES), _logit_bytes(model, *_SCORED_LOGIT_BYTES)),
        recomputes_logits=True,
    )


def _logit_bytes(model: Architecture, base: float, per_value: float) -> float:
    return base + per_value * model.hidden_size


def task_generation(demand: Demand, task: Task, layout: Layout, speed: Speed, kv_tokens: float) -> Generation:
    """Return the generation of one engine, whose KV cache has ``kv_tokens``, of all steps at once."""
    model, workers, serves = demand.architecture, layout.data_parallel_size, "tensor" in demand.parallel
    assert model is not None
    # Serving engines get samples as they have room, so all end together; the samples of a prompt go to several engines,
    # and each of these reads the prompt. Other engines get whole groups from the start.
    samples = task.samples * task.steps
    groups = samples / task.group_size
    sequences = samples / workers if serves else ceil(groups / workers) * task.group_size
    requests = Requests(
        sequences=min(samples, sequences),
        group_size=max(1.0, task.group_size / workers) if serves else task.group_size,
        prompts=task.prompts,
        responses=task.responses,
        engines=workers,
        turns=task.turns,
        caches=serves,
        image_tokens=task.image_tokens,
    )
    return generation(
        model,
        layout,
        speed,
        requests,
        kv_tokens=kv_tokens,
        max_num_seqs=DEFAULT_NUM_SEQS if speed.is_cpu else MAX_NUM_SEQS,
        weight_bytes=demand.weight_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class DecodeProfile:
    """The speed of all engines of a role together."""

    slots: float
    """Samples that they generate at the same time, or that wait for their agents meanwhile."""
    steps: Lengths
    """The lengths of responses in decoding steps, with those that pass in waits."""
    step_seconds: Callable[[float], float]
    """The time of such a step, by the number of running samples."""
    prefill: float
    """The time to read all prompts of its steps."""
    prefill_step: float
    """The time to read the tokens of one more decoding step."""


def decode_profile(demand: Demand, task: Task, layout: Layout, speed: Speed, kv_tokens: float) -> DecodeProfile:
    """Return the speed at which a task is generated, apart from the lengths of its responses."""
    workers, made = layout.data_parallel_size, task_generation(demand, task, layout, speed, kv_tokens)
    pace, prompt_tokens = made.pace, task.samples / task.group_size * task.prompts.mean
    token_s = pace.decoder.prefill(speed, prompt_tokens, task.prompts.mean) / prompt_tokens / workers
    return DecodeProfile(
        slots=made.concurrency * workers,
        steps=pace.steps,
        step_seconds=cache(lambda live: pace.seconds(max(1.0, live / workers), made.context)),
        prefill=made.prefill_seconds,
        prefill_step=token_s * task.responses.mean / pace.steps.mean,
    )


def host_task_seconds(task: Task, demands: Iterable[Demand], speed: Speed, num_hosts: int = 1) -> float:
    """Return the seconds of a node without a role, which has processes of its own where engines have."""
    calls = [speed.of_engine(demand.engine).efficiency.call_s for demand in demands if demand.own_process]
    return task.samples / num_hosts * speed.efficiency.host_sample_s + max(calls, default=0.0)


def collecting_seconds(workload: Workload, task: Task, speed: Speed, num_hosts: int = 1) -> float:
    """Return the time in which the first node without a role collects and packs what GPUs have generated."""
    generating = {other.node for other in workload.tasks if other.kind == "generate"}
    first = next((one for one in workload.tasks if one.role is None and generating.intersection(one.after)), None)
    if task is not first or speed.is_cpu:
        return 0.0
    return host_seconds(task.samples / num_hosts, task.responses.mean)


def weight_sync_seconds(
    source: Demand, target: Demand, source_gpus: int, target_gpus: int, speed: Speed, *, same_gpus: bool
) -> float:
    """Return the seconds in which the weights of a trained role reach a role that follows it."""
    model = target.architecture
    if model is None:
        return 0.0
    speed = speed.of_engine(target.engine)
    parameters, tensors = model.num_parameters, model.num_tensors
    # Engines that share GPUs discard their weights while they sleep, frozen ones too.
    if model.vision is not None and (source.training.trains_vision or (same_gpus and not speed.is_cpu)):
        parameters += model.num_encoder_parameters
    if (lora := target.follows_lora) is not None:
        parameters, tensors = adapter_parameters(model, lora), adapter_tensors(model, lora)
    size = parameters * target.weight_bytes
    # Processes on a CPU share none of its memory.
    if same_gpus and source_gpus == target_gpus == 1 and not (speed.is_cpu and target.own_process):
        return 2 * size / speed.memory + tensors * SYNC_TENSOR_S * target.own_process
    return sync_seconds(size, source_gpus, target_gpus, speed, same_gpus=same_gpus, tensors=tensors)
