"""The specification of each worker's engine, from a plan, and the building of the engine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlflow.compiler.models import replays_routing
from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec, GpuTransport
from rlflow.engines.causal_lm.kernels import check_attention
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError, UserError, first_line
from rlflow.extras import check_extra, check_training
from rlflow.recipe import Model, Optimizer
from rlflow.resources.models.vision import Part, list_parts
from rlflow.resources.planner.prediction.task_times import DEFAULT_NUM_SEQS

# The most responses that one engine generates at once.
_MAX_SEQUENCES = 1024


def check_engines(plan: Plan, extras: Iterable[str] = ()) -> None:
    """Raise a RecipeError for an engine that is not installed, or in an unsupported version.

    ``extras`` are the extras that the runtime itself needs.
    """
    roles = plan.recipe.roles.values()
    packages = [engine_kind(options.engine).package for options in roles]
    adapters = ["peft"] if any(options.lora for options in roles) else []
    check_training([*extras, *filter(None, packages), *adapters], on_gpu=is_on_gpu(plan))
    for role, options in plan.recipe.roles.items():
        if (package := engine_kind(options.engine).package) is not None:
            check_extra(package, f"roles.{role}.engine", f"engine '{options.engine}'")
        if options.lora is not None:
            check_extra("peft", f"roles.{role}.lora", "lora")
        check_attention(role, options.attention)


def spec_of(
    plan: Plan, role: str, model: Model, *, device: str, journal: Path | None = None, rank: int = 0, address: str = ""
) -> EngineSpec:
    """Return the spec of a worker's engine. ``address`` is where the role's workers meet."""
    options, placement = plan.recipe.roles[role], plan.roles[role]
    return EngineSpec(
        role=role,
        model_name=options.model,
        model=model,
        capabilities=plan.graph.capabilities(role),
        device=device,
        seed=plan.recipe.seed,
        steps=plan.recipe.steps - plan.graph.critic_warmup(role),
        optimizer=options.optimizer or Optimizer(),
        lora=plan.recipe.lora_of(role),
        train=options.train,
        routing_replay=replays_routing(plan.recipe, plan.graph, role),
        synced_parts=synced_parts(plan, role),
        layout=placement.layout,
        rank=rank,
        world_size=len(placement.workers),
        address=address,
        max_model_len=_max_model_len(plan, role),
        max_num_seqs=num_sequences(plan, role),
        gpu_transport=gpu_transport(plan, role),
        attention=options.attention,
        deterministic=options.deterministic,
        timeout_minutes=options.timeout_minutes,
        journal=journal,
    )


def num_sequences(plan: Plan, role: str) -> int:
    """Return the number of responses that one engine of the role generates at once."""
    return min(plan.prediction.memory[role].sequences or DEFAULT_NUM_SEQS, _MAX_SEQUENCES)


def gpu_transport(plan: Plan, role: str) -> GpuTransport | None:
    """Return how weights reach ``role`` from GPU to GPU; None if they go through the hosts' object stores.

    They do for CPUs, for adapters, for engines without such a transport, and where the two roles share some of their
    GPUs but not all.
    """
    follows = plan.recipe.roles[role].follows
    if follows is None or plan.recipe.lora_of(role) or not is_on_gpu(plan):
        return None
    sender, receiver = (engine_kind(plan.recipe.roles[name].engine) for name in (follows, role))
    gpus, trainer_gpus = set(plan.roles[role].bundles), set(plan.roles[follows].bundles)
    transport: GpuTransport = "ipc" if gpus <= trainer_gpus else "nccl"
    if transport == "nccl" and not gpus.isdisjoint(trainer_gpus):
        return None
    return transport if transport in sender.sends_weights_by & receiver.receives_weights_by else None


def synced_parts(plan: Plan, role: str) -> tuple[Part, ...]:
    """Return the parts of a vision-language model that go from or to a role in weight syncs: those that are trained.

    Engines that sleep discard their weights, so they get all.
    """
    source = plan.recipe.roles[role].follows or role
    targets = [sync.target for sync in plan.workload.weight_syncs if sync.source == source]
    is_discarded = any(plan.roles[target].layout.sleeps for target in targets)
    return list_parts("all" if is_discarded else plan.recipe.roles[source].train)


def is_on_gpu(plan: Plan) -> bool:
    """Return whether the plan's hosts have GPUs, rather than CPUs in their place."""
    return any(gpu.memory_gib is not None for gpu in plan.cluster.gpus.values())


def build(engine: str, spec: EngineSpec) -> Any:
    """Build an engine. Raises EngineError when it does not start."""
    try:
        return engine_kind(engine).engine(spec)
    except (UserError, EngineError):
        raise
    except Exception as error:
        reason = first_line(error)
        raise EngineError(f"role {spec.role}: engine '{engine}' did not start: {reason}") from error


def _max_model_len(plan: Plan, role: str) -> int | None:
    prompt = plan.recipe.data.max_prompt_tokens
    samplings = (node.operation.sampling for node in plan.graph.nodes if node.role == role)
    return max((sampling.longest_sequence(prompt) for sampling in samplings if sampling), default=None)
