"""The local runtime: every role in this process, on one GPU or the CPU."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlflow.compiler.plan import Plan
from rlflow.engines.journal import journal_folder
from rlflow.engines.memory import PhasePeaks
from rlflow.errors import PlacementError
from rlflow.recipe import Model
from rlflow.runtime.engine_specs import build, check_engines, is_on_gpu, spec_of
from rlflow.runtime.protocols import Engines
from rlflow.runtime.ray.cluster.machine import PCI_ORDER, gpus_of_this_machine


class LocalRuntime:
    """A runtime whose engines are plain objects, on the plan's one GPU or on the CPU."""

    def check(self, plan: Plan) -> None:
        """Raise PlacementError without the GPU that the plan needs, RecipeError for an engine that cannot start."""
        bundles = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
        assert len(bundles) == 1, "runtime_of gives plans of several GPUs to another runtime"
        if is_on_gpu(plan) and not gpus_of_this_machine():
            raise PlacementError(
                "cluster", f"the plan is for {plan.cluster.shape}, and this machine has no GPU", fix="cluster=local"
            )
        check_engines(plan)

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Engines]:
        """Build the engine of each role. Raises EngineError for an engine that does not start."""
        # CUDA reads these when the first engine initializes it.
        os.environ.update(PCI_ORDER)
        engines = Engines()
        for name, role in plan.recipe.roles.items():
            gpu = plan.roles[name].bundles[0].gpu
            device = f"cuda:{gpu}" if is_on_gpu(plan) else "cpu"
            spec = spec_of(plan, name, models[role.model], device=device, journal=journal_folder(directory.absolute()))
            engines[name] = build(role.engine, spec)
            engines.peaks = engines.peaks or PhasePeaks(device)
            engines.peaks.record(engines[name])
        yield engines
