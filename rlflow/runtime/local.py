"""Every role in this process: the runtime of one machine."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from rlflow.recipe import Model
from rlflow.runtime.protocols import Engines
from rlflow.runtime.ray.cluster.machine import PCI_ORDER, gpus_of_this_machine
from rlflow.runtime.ray.engine_specs import build, check_engines, is_on_gpu, spec_of


class LocalRuntime:
    """The engines are plain objects, on the plan's one GPU or on the processor."""

    def check(self, plan: Plan) -> None:
        """Raises PlacementError for a plan of more than one GPU, RecipeError for an engine that cannot be started."""
        bundles = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
        assert len(bundles) == 1, "runtime_of gives plans of several GPUs to another runtime"
        if is_on_gpu(plan) and not gpus_of_this_machine():
            raise PlacementError(
                "cluster", f"the plan is for {plan.cluster.shape}, and this machine has no GPU", fix="cluster=local"
            )
        check_engines(plan)

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Engines]:
        """Raises EngineError for an engine that fails."""
        # Read when CUDA starts, which the first engine makes it do.
        os.environ.update(PCI_ORDER)
        engines = Engines()
        for role, written in plan.recipe.roles.items():
            gpu = plan.roles[role].bundles[0].gpu
            device = f"cuda:{gpu}" if is_on_gpu(plan) else "cpu"
            engines[role] = build(written.engine, spec_of(plan, role, models[written.model], device=device))
        yield engines
