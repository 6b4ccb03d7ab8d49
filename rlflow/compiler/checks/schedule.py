"""Rules about steps that run some nodes several times, or ahead of training."""

from collections.abc import Sequence

from rlflow.compiler.graph import SOURCES, Graph, resampled_nodes
from rlflow.engines.registry import engine_kind
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Expect, Recipe


def check_resampling(recipe: Recipe, graph: Graph) -> None:
    """Check that all nodes work together with dynamic sampling, which runs some of them several times in a step.

    Raises GraphError, and RecipeError where ``expect.rounds`` is set and no node samples dynamically.
    """
    sampling = [node.name for node in graph.nodes if node.selects_prompts]
    if not sampling:
        if recipe.expect.rounds != 1:
            raise RecipeError("expect.rounds", "no node 'dynamic_sampling' asks for more prompts", fix="leave it out")
        return
    path = f"graph.{sampling[0]}"
    if len(sampling) > 1:
        raise GraphError(path, f"{' and '.join(sampling)} would each choose the prompts of a step", fix="leave one")
    for node in graph.nodes:
        for source in SOURCES.keys() & node.inputs.values():
            if source != "prompts":
                fact = f"it reads all {source} of a step, and {path} chooses prompts"
                raise GraphError(f"graph.{node.name}", fact, fix=f"remove graph.{node.name}, or {path}")
        if node in resampled_nodes(graph) and node.operation.new_state() is not None:
            fact = f"keeps a state that changes once a step, and {path} runs it several times in a step"
            fix = f"remove the option that needs the state (as kl_target), or {path}"
            raise GraphError(f"graph.{node.name}", fact, fix=fix)


def check_turns(recipe: Recipe, graph: Graph) -> None:
    """Check that turns are expected only where there are some. Raises RecipeError."""
    expect = recipe.expect
    longest = max((node.operation.num_turns for node in graph.nodes), default=1)
    for name in ("turns", "wait_s", "observation_tokens", "segments"):
        if longest == 1 and getattr(expect, name) != getattr(Expect, name):
            raise RecipeError(f"expect.{name}", "no node generates in several turns", fix="leave it out")
    expected = longest if expect.turns == "auto" else expect.turns
    for name, number, limit, whose in (
        ("turns", expected, longest, "that the graph allows"),
        ("segments", expect.segments, expected, "of a response"),
    ):
        if number > limit:
            fact = f"{number:g} is more than the {limit:g} turns {whose}"
            raise RecipeError(f"expect.{name}", fact, fix=f"expect.{name}={limit:g}, or a larger limit in the graph")


def check_overlap(recipe: Recipe, graph: Graph) -> None:
    """Check that generation can run ahead of training as the recipe asks. Raises RecipeError and GraphError."""
    options = recipe.overlap
    if not options.max_staleness:
        return
    path = "overlap.max_staleness"
    ahead = [node for node in graph.ahead_nodes() if node.operation.sampling]
    if not ahead:
        raise RecipeError(path, "no node generates from the prompts of the data", fix=f"{path}=0")
    for node in ahead:
        role = str(node.role)
        if recipe.roles[role].follows is None:
            trained = role in graph.trained_roles()
            why = "is trained itself, so it cannot generate meanwhile" if trained else "follows no trained role"
            raise RecipeError(path, f"role '{role}' of graph.{node.name} {why}", fix=f"{path}=0")
        in_step = [user for user in graph.nodes if user.role == role and user not in ahead]
        if in_step:
            fact = f"role '{role}' also runs graph.{in_step[0].name}, which belongs to the step that trains"
            raise RecipeError(path, fact, fix=f"another role for graph.{in_step[0].name}, or {path}=0")
    if resampled := resampled_nodes(graph):
        name = resampled[-1].name
        fact = f"graph.{name} chooses the prompts of a step by their rewards, which needs that step's policy"
        raise RecipeError(path, fact, fix=f"{path}=0, or no graph.{name}")
    if options.in_flight != "wait":
        _check_in_flight(recipe, ahead)


def _check_in_flight(recipe: Recipe, generators: Sequence[GraphNode]) -> None:
    """Raise RecipeError where new weights cannot interrupt the generation of these nodes."""
    path, value = "overlap.in_flight", recipe.overlap.in_flight
    if recipe.overlap.deterministic:
        fact = f"'{value}' lets the moment at which weights arrive decide which version samples a token"
        raise RecipeError(path, fact, fix="overlap.deterministic=false, or overlap.in_flight=wait")
    if len(generators) > 1:
        names = " and ".join(f"graph.{node.name}" for node in generators)
        raise RecipeError(path, f"'{value}' works for one node that generates, got {names}", fix=f"{path}=wait")
    engine, node = recipe.roles[str(generators[0].role)].engine, generators[0]
    if not engine_kind(engine).concurrent:
        fact = f"expected an engine that can be interrupted, got '{engine}' for graph.{node.name}"
        raise RecipeError(path, fact, fix=f"{path}=wait, or roles.{node.role}.engine=vllm")
    if not node.operation.can_stream:
        raise RecipeError(
            path, f"graph.{node.name} cannot be interrupted, because it overrides run", fix=f"{path}=wait"
        )
