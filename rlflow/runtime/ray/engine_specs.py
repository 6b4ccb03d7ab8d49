"""From a plan to what each worker's engine is built from, and the building of it."""

from collections.abc import Iterable, Sequence
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec, WeightBackend
from rlflow.engines.causal_lm.kernels import check_attention
from rlflow.engines.registry import engine_class, engine_kind
from rlflow.errors import EngineError, PlacementError, UserError, first_line
from rlflow.extras import check_extra, check_training
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model, Optimizer

# Responses that one engine writes at once where memory does not say how many it has room for, and at most.
_SEQUENCES, _MOST_SEQUENCES = 256, 1024


def check_engines(plan: Plan, extras: Iterable[str] = ()) -> None:
    """Raise RecipeError for a role whose engine is not installed, or in a version that is not supported, and
    PlacementError for a worker on several hosts. ``extras`` are those that the runtime needs."""
    written_roles = plan.recipe.roles.values()
    packages = [engine_kind(written.engine).package for written in written_roles]
    adapters = ["peft"] if any(written.lora for written in written_roles) else []
    check_training([*extras, *filter(None, packages), *adapters], on_gpu=is_on_gpu(plan))
    for role, written in plan.recipe.roles.items():
        if (package := engine_kind(written.engine).package) is not None:
            check_extra(package, f"roles.{role}.engine", f"engine '{written.engine}'")
        if written.lora is not None:
            check_extra("peft", f"roles.{role}.lora", "lora")
        check_attention(role, written.attention)
        for worker in plan.roles[role].workers:
            if len(hosts := {bundle.host for bundle in worker.bundles}) > 1:
                raise PlacementError(
                    f"roles.{role}.pipeline_parallel_size",
                    f"the stages of one engine are on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and an engine is"
                    " started within one",
                    fix="stages that fit a host, a smaller model, or GPUs with more memory",
                )


def spec_of(plan: Plan, role: str, model: Model, *, device: str, rank: int = 0, address: str = "") -> EngineSpec:
    """Of the worker ``rank`` of ``role``; ``address`` is where its workers meet."""
    written, placement = plan.recipe.roles[role], plan.roles[role]
    return EngineSpec(
        role=role,
        model_name=written.model,
        model=model,
        capabilities=plan.graph.capabilities(role),
        device=device,
        seed=plan.recipe.seed,
        steps=plan.recipe.steps - plan.graph.critic_warmup(role),
        optimizer=written.optimizer or Optimizer(),
        lora=plan.recipe.lora_of(role),
        layout=placement.layout,
        rank=rank,
        world_size=len(placement.workers),
        address=address,
        max_model_len=_max_model_len(plan, role),
        max_num_seqs=num_sequences(plan, role),
        weight_backend=weight_backend(plan, role),
        attention=written.attention,
        deterministic=written.deterministic,
        timeout_minutes=written.timeout_minutes,
    )


def num_sequences(plan: Plan, role: str) -> int:
    """Responses that one engine of the role writes at once."""
    return min(plan.prediction.memory[role].sequences or _SEQUENCES, _MOST_SEQUENCES)


def weight_backend(plan: Plan, role: str) -> WeightBackend | None:
    """Return how weights reach ``role`` from GPU to GPU; None if they go through the hosts' object stores.

    They do for CPUs, for adapters, for engines without such a transport, and where the two roles share some of their
    GPUs but not all.
    """
    follows = plan.recipe.roles[role].follows
    if follows is None or plan.recipe.lora_of(role) or not is_on_gpu(plan):
        return None
    sender, receiver = (engine_kind(plan.recipe.roles[name].engine) for name in (follows, role))
    gpus, trainer_gpus = set(plan.roles[role].bundles), set(plan.roles[follows].bundles)
    backend: WeightBackend = "ipc" if gpus <= trainer_gpus else "nccl"
    if backend == "nccl" and not gpus.isdisjoint(trainer_gpus):
        return None
    return backend if backend in sender.sends_weights_by & receiver.receives_weights_by else None


def is_on_gpu(plan: Plan) -> bool:
    """Whether its hosts have GPUs, and not processors in their place."""
    return any(gpu.memory_gib is not None for gpu in plan.cluster.gpus.values())


def build(engine: str, spec: EngineSpec) -> Any:
    """Raises EngineError for an engine that does not start."""
    try:
        return engine_class(engine)(spec)
    except (UserError, EngineError):
        raise
    except Exception as error:
        reason = first_line(error)
        raise EngineError(f"role {spec.role}: engine '{engine}' did not start: {reason}") from error


def _max_model_len(plan: Plan, role: str) -> int | None:
    operations: Sequence[Any] = [node.operation for node in plan.graph.nodes if node.role == role]
    longest = max((o.max_tokens for o in operations if isinstance(o, Generate)), default=None)
    return None if longest is None else plan.recipe.data.max_prompt_tokens + longest
