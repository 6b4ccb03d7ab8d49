"""lower: turn a graph into the requirements of every role and the workload of a step, for any cluster."""

from dataclasses import dataclass

from rlflow.compiler.edges import graph_edges
from rlflow.compiler.graph import Graph
from rlflow.compiler.models import WEIGHT_BYTES, models_in_use, role_architecture, routing_bytes, training_memory
from rlflow.compiler.tasks import evaluation_tasks, step_tasks
from rlflow.engines.registry import engine_kind
from rlflow.recipe import Recipe
from rlflow.resources.demand import Demand
from rlflow.resources.workload import Ahead, WeightSync, Workload

# Bytes of a token as UTF-8 text: English has 4 to 5 letters in a token, numbers and code have fewer.
_TEXT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The demands of all roles and the workload of a step."""

    demands: tuple[Demand, ...]
    """One for each role, sorted by name."""
    workload: Workload


def lower(recipe: Recipe, graph: Graph) -> Requirements:
    """Return what each role needs and what a step does, whatever the cluster."""
    trained = graph.trained_roles()
    demands = []
    for name, role in sorted(recipe.roles.items()):
        model, capabilities = recipe.models[role.model], graph.capabilities(name)
        demands.append(
            Demand(
                role=name,
                engine=role.engine,
                parallel=_ways_to_be_parallel(recipe, graph, name),
                job="train" if name in trained else "serve" if "Generates" in capabilities else "score",
                architecture=role_architecture(recipe, graph, name),
                dtype=model.dtype,
                weight_bytes=WEIGHT_BYTES[model.dtype],
                training=training_memory(role, model),
                own_process=engine_kind(role.engine).package is not None,
                follows_lora=recipe.lora_of(name) if role.follows else None,
                pins=role,
            )
        )
    syncs = tuple(
        WeightSync(source=role.follows, target=name) for name, role in sorted(recipe.roles.items()) if role.follows
    )
    tasks = step_tasks(recipe, graph)
    routing = {name: routing_bytes(recipe, graph, name) for name in recipe.roles}
    workload = Workload(
        tasks=tasks,
        weight_syncs=syncs,
        edges=graph_edges(graph, tasks, _text_bytes(recipe), routing),
        evaluation=evaluation_tasks(recipe, graph, tasks),
        ahead=_ahead(recipe, graph),
    )
    return Requirements(demands=tuple(demands), workload=workload)


def _ways_to_be_parallel(recipe: Recipe, graph: Graph, role: str) -> frozenset[str]:
    """Return the ways of the role's engine. Pipeline stages of an engine do not know each other's experts."""
    ways = engine_kind(recipe.roles[role].engine).parallel
    return ways - {"pipeline"} if routing_bytes(recipe, graph, role) else ways


def _ahead(recipe: Recipe, graph: Graph) -> Ahead | None:
    if not recipe.overlap.max_staleness:
        return None
    return Ahead(nodes=tuple(node.name for node in graph.ahead_nodes()), overlap=recipe.overlap)


def _text_bytes(recipe: Recipe) -> float:
    """Return the expected bytes of a token as text: one where every model's tokens are characters or bytes."""
    are_single = (
        model.random_weights or (model.recipe and _text_bytes(model.recipe) == 1)
        for model in models_in_use(recipe).values()
    )
    return 1 if all(are_single) else _TEXT_BYTES
