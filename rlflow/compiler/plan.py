"""plan: what runs where. A Plan holds all that a run needs and can be written and read back."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph, wire
from rlflow.compiler.lower import Requirements, WeightCopy, lower
from rlflow.errors import RecipeError
from rlflow.recipe import Recipe, recipe_from, to_yaml
from rlflow.resources.cluster import Cluster, cluster_from
from rlflow.resources.layout import Layout, Resources
from rlflow.resources.planner import Bundle, RolePlacement, Worker, place

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    recipe: Recipe
    graph: Graph
    copies: tuple[WeightCopy, ...]
    cluster: Cluster
    roles: Mapping[str, RolePlacement]

    @property
    def fingerprint(self) -> str:
        """Of the experiment, wherever it runs: the recipe without what it pins of the placement and its checkpoints."""
        experiment = asdict(self.recipe)
        del experiment["checkpoints"]
        for role in experiment["roles"].values():
            for name in Resources.__dataclass_fields__:
                del role[name]
        canonical = json.dumps(experiment, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """As ``plan.json`` holds it; ``plan_from`` reads it back."""
        return {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "recipe": asdict(self.recipe),
            "gpus": {name: asdict(gpu) for name, gpu in self.cluster.gpus.items()},
            "hosts": [asdict(host) for host in self.cluster.hosts],
            "roles": {name: asdict(placement) for name, placement in self.roles.items()},
        }


def plan(recipe: Recipe, graph: Graph, requirements: Requirements, cluster: Cluster) -> Plan:
    """Raises PlacementError."""
    roles = place(requirements.demands, cluster)
    return Plan(recipe=recipe, graph=graph, copies=requirements.copies, cluster=cluster, roles=roles)


def compile_recipe(recipe: Recipe, cluster: Cluster) -> Plan:
    """All stages from a recipe to its plan."""
    graph = wire(recipe)
    return plan(recipe, graph, lower(recipe, graph), cluster)


def plan_from(mapping: Mapping[str, Any]) -> Plan:
    """From what ``to_dict`` gave. Raises RecipeError for a plan of another version, or one that was edited."""
    if (version := mapping.get("schema_version")) != SCHEMA_VERSION:
        raise RecipeError(
            "plan", f"schema_version is {version}, this version of rlflow reads {SCHEMA_VERSION}", fix="plan anew"
        )
    try:
        recipe = recipe_from(mapping["recipe"])
        graph = wire(recipe)
        roles = {name: _placement(entry) for name, entry in mapping["roles"].items()}
        cluster = cluster_from({"hosts": mapping["hosts"], "gpus": mapping["gpus"]})
        read = Plan(recipe=recipe, graph=graph, copies=lower(recipe, graph).copies, cluster=cluster, roles=roles)
        intact = read.fingerprint == mapping["fingerprint"] and roles.keys() == recipe.roles.keys()
        intact = intact and _are_there(read)
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError("plan", f"is not a whole plan ({error!r})", fix="plan anew") from None
    if not intact:
        raise RecipeError("plan", "was changed after planning", fix="plan anew")
    return read


def _are_there(plan: Plan) -> bool:
    """Whether every role has workers, on GPUs that the hosts have."""
    gpus = {(host.name, gpu) for host in plan.cluster.hosts for gpu in range(host.gpus)}
    return all(
        placement.workers and all((b.host, b.gpu) in gpus for worker in placement.workers for b in worker.bundles)
        for placement in plan.roles.values()
    )


def read_plan(path: Path) -> Plan:
    """Raises RecipeError for a file that is no plan."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError("plan", f"'{path}' cannot be read ({reason})", fix="give the plan.json of a run") from None
    if not isinstance(content, dict):
        raise RecipeError("plan", f"'{path}' is not a plan", fix="give the plan.json of a run")
    return plan_from(content)


def write_plan(plan: Plan, directory: Path) -> None:
    """``plan.json``, and ``recipe.yaml`` for a person."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.yaml").write_text(to_yaml(plan.recipe))
    (directory / "plan.json").write_text(json.dumps(plan.to_dict(), indent=1, sort_keys=True))


def _placement(entry: Mapping[str, Any]) -> RolePlacement:
    workers = tuple(Worker(tuple(Bundle(**bundle) for bundle in worker["bundles"])) for worker in entry["workers"])
    return RolePlacement(Layout(**entry["layout"]), workers)
