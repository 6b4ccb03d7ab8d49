"""Which runtime a plan needs."""

from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_kind
from rlflow.runtime.base import Runtime


def runtime_of(plan: Plan) -> Runtime:
    """This process for one GPU and engines that live in it; Ray for all else."""
    bundles = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    packages = {engine_kind(role.engine).package for role in plan.recipe.roles.values()}
    if len(bundles) == 1 and packages == {None}:
        from rlflow.runtime.local import LocalRuntime

        return LocalRuntime()
    from rlflow.runtime.ray import RayRuntime

    return RayRuntime()
