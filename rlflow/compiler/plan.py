"""plan: find where every role runs. A Plan holds everything that a run needs, and can be written and read back."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from rlflow.compiler.cautions import graph_warnings
from rlflow.compiler.checks import check
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.graph import Graph
from rlflow.compiler.problem import Problem
from rlflow.compiler.wire import wire
from rlflow.errors import PlacementError, RecipeError
from rlflow.recipe import Recipe
from rlflow.recipe.load import recipe_from, to_yaml
from rlflow.resources.cluster import Cluster, cluster_from
from rlflow.resources.layout import Bundle, Layout, RolePlacement, Worker
from rlflow.resources.planner.prediction.prediction import Prediction, predict
from rlflow.resources.planner.search.search import Search
from rlflow.resources.time.calibration import Calibration, calibration_from
from rlflow.resources.workload import Workload
from rlflow.schema import parse
from rlflow.system.text_files import replace_text


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The predicted cost of all steps, evaluations and checkpoints, without the start of engines."""

    hours: float
    hours_range: tuple[float, float]
    """The range in which the time is, as for a step."""
    gpu_hours: float
    """Hours of the GPUs in use."""
    price: float | None
    """The price of all GPUs of the hosts in use, since hosts are rented whole; None if a kind of GPU has no price."""


def run_cost(
    recipe: Recipe, prediction: Prediction, cluster: Cluster, placements: Mapping[str, RolePlacement]
) -> RunCost:
    """Return the cost of a run of the recipe."""
    # The first evaluation is before training, and the last one and the last checkpoint are after the last step.
    evaluations = 0 if recipe.evaluation is None else 1 + ceil(recipe.steps / recipe.evaluation.every)
    checkpoints = ceil(recipe.steps / recipe.checkpoints.every)
    pauses = evaluations * prediction.evaluation_seconds + checkpoints * prediction.checkpoint_seconds
    hours, low, high = (
        (recipe.steps * step + pauses) / 3600 for step in (prediction.step_seconds, *prediction.step_seconds_range)
    )
    used = {bundle.host for placement in placements.values() for bundle in placement.bundles}
    prices = [(host.gpus, cluster.gpus[host.gpu].price_per_hour) for host in cluster.hosts if host.name in used]
    price = None
    if all(price_per_hour is not None for _, price_per_hour in prices):
        price = hours * sum(gpus * (price_per_hour or 0.0) for gpus, price_per_hour in prices)
    return RunCost(hours=hours, hours_range=(low, high), gpu_hours=hours * prediction.num_gpus, price=price)


SCHEMA_VERSION = 9
# The path of the error for a search that found nothing, where no value of the recipe alone is to blame.
NOTHING_FITS = "roles"
# Seconds. If a step on CPUs takes longer, the recipe is meant for GPUs.
_LONG_STEP = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe on a cluster: the placement of every role, the workload of a step, and the predictions."""

    recipe: Recipe
    """The recipe, with all sizes that it pins."""
    graph: Graph
    """The nodes and the edges between them."""
    workload: Workload
    """The tasks, data and weight syncs of a step."""
    cluster: Cluster
    """The hosts and their GPUs."""
    roles: Mapping[str, RolePlacement]
    """The layout of each role, and the GPUs of its workers."""
    prediction: Prediction
    """The predicted times and memory."""

    @property
    def needs_gpus(self) -> bool:
        """Return whether the plan puts a recipe for GPUs on CPUs, where a step would take more than ten minutes."""
        on_cpus = self.prediction.headroom_gib is None
        return on_cpus and self.prediction.step_seconds > _LONG_STEP

    @property
    def unit(self) -> str:
        """Return the name of the devices in use: GPU, or CPU where memory is not modelled."""
        return "CPU" if self.prediction.headroom_gib is None else "GPU"

    @property
    def takes_turns(self) -> bool:
        """Return whether steps are generated ahead on GPUs that also train."""
        return self.workload.takes_turns({role: placement.bundles for role, placement in self.roles.items()})

    @property
    def steps_per_turn(self) -> int:
        """Return the number of steps that are generated at the same moment, before the first of them trains."""
        overlap = self.recipe.overlap
        return overlap.max_staleness + 1 if self.takes_turns and overlap.in_flight == "wait" else 1

    @property
    def cost(self) -> RunCost:
        """Return the time and the price of the run."""
        return run_cost(self.recipe, self.prediction, self.cluster, self.roles)

    @property
    def calibration(self) -> Calibration:
        """Return the measured efficiencies that the plan is based on; empty if nothing was measured."""
        figures = self.prediction.calibration
        return calibration_from(figures, self.cluster) if figures else {}

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies the experiment, not its placement."""
        canonical = json.dumps(experiment_of(self.recipe), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``plan.json``; ``plan_from`` reads it back."""
        predicted = asdict(self.prediction)
        memory = predicted.pop("memory")
        content = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "recipe": asdict(self.recipe),
            "workload": asdict(self.workload),
            "gpus": {name: asdict(gpu) for name, gpu in self.cluster.gpus.items()},
            "hosts": [asdict(host) for host in self.cluster.hosts],
            "roles": {name: asdict(placed) | {"memory_gib": memory[name]} for name, placed in self.roles.items()},
            "run": asdict(self.cost),
            **predicted,
        }
        return content | {"digest": _digest(content)}


def plan(problem: Problem, search: Search) -> Plan:
    """Search for the fastest placement and predict it. Raises PlacementError where nothing fits."""
    result = search.best()
    if result is None:
        fix = "a cluster with more GPUs, or a smaller model"
        raise PlacementError(NOTHING_FITS, f"nothing fits {problem.cluster.shape}", fix=fix)
    prediction = predict(search.inputs, result)
    warnings = (*prediction.warnings, *graph_warnings(problem.recipe, problem.graph))
    placed = Plan(
        recipe=problem.recipe,
        graph=problem.graph,
        workload=search.inputs.workload,
        cluster=problem.cluster,
        roles=result.roles,
        prediction=replace(prediction, warnings=warnings),
    )
    if not placed.needs_gpus:
        return placed
    time = format_duration(prediction.step_seconds)
    line = f"a step takes {time} on CPUs: this recipe is for GPUs (cluster=2x8, cluster=auto)"
    return replace(placed, prediction=replace(prediction, warnings=(line, *warnings)))


def format_duration(seconds: float) -> str:
    """Return seconds, minutes, hours, days or years, the largest of them that gives at least one: "4.1 days"."""
    scales = ((365 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes"))
    size, name = next((scale for scale in scales if seconds >= scale[0]), (1, "seconds"))
    return f"{seconds / size:.1f} {name}"


def plan_from(mapping: Mapping[str, Any]) -> Plan:
    """Read a plan from the content of ``plan.json``. Raises RecipeError for another version or an edited plan."""
    if (version := mapping.get("schema_version")) != SCHEMA_VERSION:
        raise RecipeError(
            "plan", f"schema_version is {version}, this version of rlflow reads {SCHEMA_VERSION}", fix="plan again"
        )
    try:
        recipe = recipe_from(mapping["recipe"])
        graph = wire(recipe)
        check(recipe, graph)
        roles = {name: _role_placement(entry) for name, entry in mapping["roles"].items()}
        cluster = cluster_from({"hosts": mapping["hosts"], "gpus": mapping["gpus"]})
        workload = parse(Workload, mapping["workload"], "plan.workload")
        prediction = _prediction(mapping)
        plan = Plan(recipe=recipe, graph=graph, workload=workload, cluster=cluster, roles=roles, prediction=prediction)
        intact = mapping["digest"] == _digest(mapping)
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError("plan", f"is not a complete plan ({error!r})", fix="plan again") from None
    if not intact:
        raise RecipeError("plan", "was changed after planning", fix="plan again")
    return plan


def read_plan(path: Path) -> Plan:
    """Read a plan from a file. Raises RecipeError for a file that is not a plan."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError("plan", f"'{path}' cannot be read ({reason})", fix="give the plan.json of a run") from None
    if not isinstance(content, dict):
        raise RecipeError("plan", f"'{path}' is not a plan", fix="give the plan.json of a run")
    return plan_from(content)


def write_plan(plan: Plan, directory: Path) -> None:
    """Write ``plan.json``, and ``recipe.yaml`` for a person to read."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / "recipe.yaml", to_yaml(plan.recipe))
    text = json.dumps(plan.to_dict(), indent=1, sort_keys=True)
    # Lists of numbers, such as expected lengths, stay on one line.
    text = re.sub(r"\[\n[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    replace_text(directory / "plan.json", text)


def _prediction(mapping: Mapping[str, Any]) -> Prediction:
    values = {field.name: mapping[field.name] for field in fields(Prediction) if field.name in mapping}
    memory = {role: entry["memory_gib"] for role, entry in mapping["roles"].items()}
    return parse(Prediction, values | {"memory": memory}, "plan")


def _role_placement(entry: Mapping[str, Any]) -> RolePlacement:
    workers = tuple(Worker(tuple(Bundle(**bundle) for bundle in worker["bundles"])) for worker in entry["workers"])
    return RolePlacement(Layout(**entry["layout"]), workers)


def _digest(mapping: Mapping[str, Any]) -> str:
    """Return a hash of the plan's content as JSON."""
    content = json.loads(json.dumps({key: value for key, value in mapping.items() if key != "digest"}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
