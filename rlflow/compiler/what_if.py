"""Answers that need more planning: the largest sizes that fit a plan's cluster, and what pinned values cost."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlflow.compiler.models import model_architecture
from rlflow.compiler.problem import Problem
from rlflow.errors import UserError
from rlflow.recipe import Recipe
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import describe_pools
from rlflow.resources.planner.prediction.overlap_prediction import predict_overlap, step_seconds
from rlflow.resources.workload import Overlap

# Sizes up to so many times the recipe's are tried.
_MOST_TIMES = 64
# A difference in time below this counts as none.
_SAME = 0.01


def largest_sizes(problem: Problem) -> Iterator[str]:
    """Yield the largest batch, groups and responses that fit safely, each with all other sizes as they are."""
    problem = replace(problem, margin=Margin.SAFE)
    recipe = problem.recipe
    yield _largest("data.batch_size", problem, recipe.data.batch_size, _with_batch)
    for node in problem.graph.nodes:
        sampling = node.operation.sampling
        if sampling is None or node.role is None:
            continue
        if (size := sampling.group_size) > 1:
            yield _largest(f"graph.{node.name}.group_size", problem, size, _with_option(node.name, "group_size"))
        model = model_architecture(recipe.models[recipe.roles[node.role].model])
        prompt = sampling.longest_sequence(recipe.data.max_prompt_tokens) - sampling.max_tokens
        limit = model.max_position_embeddings - prompt if model else None
        tokens = sampling.max_tokens
        yield _largest(f"graph.{node.name}.max_tokens", problem, tokens, _with_option(node.name, "max_tokens"), limit)


def _with_batch(recipe: Recipe, size: int) -> Recipe:
    return replace(recipe, data=replace(recipe.data, batch_size=size))


def _with_option(node: str, option: str) -> Callable[[Recipe, int], Recipe]:
    """Return a function that sets an option of a node."""

    def changed(recipe: Recipe, value: int) -> Recipe:
        graph: Mapping[str, Mapping[str, Any]] = {**recipe.graph, node: {**recipe.graph[node], option: value}}
        return replace(recipe, graph=graph)

    return changed


def _largest(
    key: str, problem: Problem, size: int, changed: Callable[[Recipe, int], Recipe], limit: int | None = None
) -> str:
    """Return the key with the largest value that fits, within 2%, as the command line takes it."""

    def fits(value: int) -> bool:
        return problem.with_recipe(changed(problem.recipe, value)).fits()

    low, high = size, 2 * size
    limit = _MOST_TIMES * size if limit is None else limit
    while high < limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit)
    if fits(high):
        return f"{key}={high}" + (" or more" if limit == _MOST_TIMES * size else ", the model's positions")
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return f"{key}={low}"


def gain_of_overlap(problem: Problem) -> str | None:
    """Return how long a step takes with generation ahead of training; None where a recipe cannot or does so already."""
    if problem.recipe.overlap.max_staleness:
        return None
    overlapping = problem.with_recipe(replace(problem.recipe, overlap=Overlap(max_staleness=1)))
    try:
        search = overlapping.search()
        ahead, synchronous = search.best(), problem.best()
    except UserError:
        return None
    if ahead is None or synchronous is None:
        return None
    if (overlap := predict_overlap(ahead.candidate, search.inputs, stalenesses=())) is None:
        return None
    gain = 1 - overlap.step_seconds / synchronous.candidate.schedule.step_seconds
    what = describe_pools(ahead.candidate.partition, ahead.candidate.gpus)
    change = f"{gain:.0%} less" if gain > _SAME else f"{-gain:.0%} more" if gain < -_SAME else "the same"
    return f"overlap.max_staleness=1: {overlap.step_seconds:.4g} s, {change} ({what})"


def cost_of_pins(problem: Problem) -> str | None:
    """Return what the planner would choose in place of the pinned values, and the time that it would save."""
    pinned, free = problem.best(), problem.without(problem.pins).best()
    if not problem.pins or pinned is None or free is None:
        return None
    # Times depend on the layouts that were chosen, and not on what was pinned.
    inputs = problem.search().inputs
    seconds, fewer = (step_seconds(best.candidate, inputs) for best in (pinned, free))
    saved = 1 - fewer / seconds if seconds else 0.0
    if saved < _SAME:
        return "the pinned values cost less than 1% of the step time"
    choices = []
    for pin in problem.pins:
        layout = free.candidate.choices[pin.role].layout
        value = getattr(layout, "num_gpus" if pin.field == "gpus" else pin.field, None)
        if value is not None and value != pin.value:
            choices.append(str(replace(pin, value=value)))
    instead = f", with {', '.join(choices)}" if choices else ""
    return f"without pinned values a step takes {fewer:.3g} s, {saved:.0%} less{instead}"
