"""Every role in this process: the runtime of one machine."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_class
from rlflow.errors import EngineError, PlacementError, UserError, below
from rlflow.recipe import Model, Optimizer


class LocalRuntime:
    """The engines are plain objects, on the plan's one GPU or on the processor."""

    def check(self, plan: Plan) -> None:
        """Raises PlacementError for a plan of more than one GPU, RecipeError for an engine that cannot be started."""
        bundles = {b for placement in plan.roles.values() for worker in placement.workers for b in worker.bundles}
        if len(bundles) > 1:
            raise PlacementError(
                "cluster",
                f"the plan uses {len(bundles)} GPUs of {plan.cluster.shape}, and this version runs plans of one",
                fix="dry_run=true prints the plan; cluster=local runs a small recipe here",
            )
        if _is_on_gpu(plan) and not gpus_of_this_machine():
            raise PlacementError(
                "cluster", f"the plan is for {plan.cluster.shape}, and this machine has no GPU", fix="cluster=local"
            )
        for role, written in plan.recipe.roles.items():
            with below(f"roles.{role}"):
                engine_class(written.engine)

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model]) -> Iterator[Mapping[str, Any]]:
        """Raises EngineError for an engine that fails."""
        yield {role: _build(plan, role, models[plan.recipe.roles[role].model]) for role in plan.roles}


def _is_on_gpu(plan: Plan) -> bool:
    return any(gpu.memory_gib is not None for gpu in plan.cluster.gpus.values())


def _build(plan: Plan, role: str, model: Model) -> Any:
    written = plan.recipe.roles[role]
    placement = plan.roles[role]
    gpu = placement.workers[0].bundles[0].gpu
    spec = EngineSpec(
        role=role,
        model_name=written.model,
        model=model,
        capabilities=plan.graph.capabilities(role),
        device=f"cuda:{gpu}" if _is_on_gpu(plan) else "cpu",
        seed=plan.recipe.seed,
        steps=plan.recipe.steps,
        optimizer=written.optimizer or Optimizer(),
        micro_batch_tokens=placement.layout.micro_batch_tokens,
        gradient_checkpointing=placement.layout.gradient_checkpointing,
    )
    try:
        return engine_class(written.engine)(spec)
    except UserError:
        raise
    except Exception as error:
        raise EngineError(f"role {role}: engine '{written.engine}' did not start: {error}") from error


def gpus_of_this_machine() -> list[str]:
    """The names of its GPUs, as nvidia-smi tells them; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
