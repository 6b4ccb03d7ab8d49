"""The compiler turns a recipe and a cluster into a plan, in pure functions between frozen dataclasses.

    Recipe --wire--> Graph --check, lower--> Requirements --plan (x Cluster)--> Plan

``problem`` holds a recipe with its graph and a cluster, and has the two checked and lowered before a search;
``infeasible`` says why there is no plan and what would fit.
Compiling imports neither torch nor ray.
"""

from dataclasses import replace

from rlflow.compiler.infeasible import infeasible_error, safer_changes
from rlflow.compiler.plan import Plan, plan
from rlflow.compiler.problem import Problem
from rlflow.compiler.wire import wire
from rlflow.errors import PlacementError
from rlflow.recipe import Recipe
from rlflow.resources.cluster import Cluster
from rlflow.resources.planner.confidence import Verdict
from rlflow.resources.time.calibration import Calibration


def compile_recipe(recipe: Recipe, cluster: Cluster, calibration: Calibration | None = None) -> Plan:
    """Plan a recipe on a cluster; ``calibration`` replaces the efficiencies that times are predicted with.

    Raises RecipeError, GraphError and PlacementError.
    """
    problem = Problem(recipe, wire(recipe), cluster, calibration or {})
    try:
        fastest = plan(problem, problem.search())
    except PlacementError as error:
        raise infeasible_error(problem, error) from None
    if fastest.prediction.verdict is not Verdict.TIGHT:
        return fastest
    return replace(fastest, prediction=replace(fastest.prediction, safer_with=safer_changes(problem)))
