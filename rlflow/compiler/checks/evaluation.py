"""Rules about the evaluation on held-out rows."""

from rlflow.batch import MAX_ROWS
from rlflow.compiler.graph import Graph, accuracy_node, evaluation_nodes
from rlflow.errors import GraphError, RecipeError
from rlflow.recipe import Recipe
from rlflow.recipe.evaluation import Evaluation

_NO_RESPONSES = "pairs are given, and no responses are generated"


def check_evaluation(recipe: Recipe, graph: Graph) -> None:
    """Check that the graph can be evaluated on held-out rows as the recipe asks."""
    if recipe.evaluation is None:
        return
    if graph.evaluation_metric == "reward" and evaluation_nodes(graph) is None:
        fact = "needs a node that generates, and a node that gives Rewards and reads its responses alone"
        raise GraphError("evaluation", fact, fix="add rewards: {node: reward}, or evaluation=null")
    if graph.evaluation_metric == "accuracy" and accuracy_node(graph) is None:
        fact = "no node that trains on pairs has a method 'accuracy', the share of pairs that it gets right"
        raise GraphError(
            "evaluation", fact, fix="derive it from rlflow.nodes.preference.Preference, or evaluation=null"
        )
    if not recipe.evaluation.sets_with(recipe.data.eval_split):
        raise RecipeError(
            "data.eval_split", "is missing, and evaluation needs it", fix="name a split, or evaluation=null"
        )
    _check_size(recipe.evaluation, recipe.data.eval_split)
    _check_responses(recipe.evaluation, graph)


def _check_size(options: Evaluation, eval_split: str | None) -> None:
    """Check that arrays can hold the responses of an evaluation."""
    for name, held_out in options.sets_with(eval_split).items():
        prompts, responses = options.prompts_of(held_out), options.responses_of(held_out)
        if prompts * responses > MAX_ROWS:
            path = f"evaluation.sets.{name}" if name else "evaluation"
            fact = f"{responses} responses to each of {prompts} prompts are more than {MAX_ROWS}"
            raise RecipeError(f"{path}.num_responses", fact, fix=f"fewer responses, or a smaller {path}.num_prompts")


def _check_responses(options: Evaluation, graph: Graph) -> None:
    """Check that several responses to a prompt are generated where any are, and sampled."""
    counts = {"evaluation": options.num_responses}
    counts |= {f"evaluation.sets.{name}": options.responses_of(held_out) for name, held_out in options.sets.items()}
    several = [path for path, count in counts.items() if count > 1]
    sampled = {"temperature": options.temperature, "top_p": options.top_p}
    sampling_options = [name for name, value in sampled.items() if value is not None]
    sampling_options += ["pass_reward"] * (options.pass_reward != Evaluation.pass_reward)
    if sampling_options and not several:
        if graph.evaluation_metric == "accuracy":
            raise RecipeError(f"evaluation.{sampling_options[0]}", _NO_RESPONSES, fix="leave it out")
        fact = "a single response has the likeliest tokens, whatever the temperature"
        if sampling_options[0] == "pass_reward":
            fact = "decides about pass@k, which is not measured with a single response"
        raise RecipeError(f"evaluation.{sampling_options[0]}", fact, fix="evaluation.num_responses=8, or leave it out")
    if not several:
        return
    path = f"{several[0]}.num_responses"
    if graph.evaluation_metric == "accuracy":
        raise RecipeError(path, _NO_RESPONSES, fix="leave it out")
    generator, _ = evaluation_nodes(graph) or (None, None)
    sampling = generator.operation.sampling if generator else None
    if options.temperature is None and sampling is not None and not sampling.temperature:
        fact = "all responses to a prompt would be the same at temperature 0, that of training"
        raise RecipeError(path, fact, fix="evaluation.temperature=1")
