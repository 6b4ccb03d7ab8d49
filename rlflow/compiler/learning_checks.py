"""Checks that a recipe can learn: options that are valid one by one, and together leave a policy nothing to learn."""

from collections.abc import Iterator, Mapping
from itertools import product

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.advantages import GreedyAdvantage, TeacherAdvantage
from rlflow.nodes.generate import Generate
from rlflow.nodes.policy_update import PolicyGradient
from rlflow.nodes.reward import Reward
from rlflow.nodes.reward_shaping import OverlongPenalty
from rlflow.recipe import Model, Recipe

# Arrays count rows in 32 bits.
_MAX_ROWS = 2**31 - 1


def check_learning(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError or GraphError for a policy that would learn nothing, or not from its own responses."""
    nodes = {node.name: node for node in graph.nodes}
    _check_evaluation_size(recipe)
    _check_learning_rates(recipe, graph)
    for node in graph.nodes:
        if isinstance(node.operation, Generate):
            _check_size(recipe, node, node.operation)
        if isinstance(node.operation, PolicyGradient):
            for generator in _generators(node.inputs.get("rollouts", ""), nodes):
                _check_sampling(recipe, node, generator, nodes)
            _check_warmup(graph, node, node.operation)
        if isinstance(node.operation, Reward):
            for generator in _generators(node.inputs.get("rollouts", ""), nodes):
                _check_environment(node, node.operation, generator)
        if isinstance(node.operation, GreedyAdvantage):
            _check_baseline(node, nodes)
        if isinstance(node.operation, TeacherAdvantage):
            _check_teacher(recipe, graph, node, nodes)
        if isinstance(node.operation, OverlongPenalty):
            for generator in _generators(node.inputs.get("rollouts", ""), nodes):
                _check_penalty(node, node.operation, generator)
        _check_minibatches(recipe, node, nodes)
        if reference := nodes.get(node.inputs.get("reference", "")):
            _check_reference(recipe, graph, reference)


def _check_learning_rates(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError for a learning rate that the run ends too early to reach."""
    for name, role in recipe.roles.items():
        # The schedule of a policy begins after the steps that train the critic alone.
        before = graph.critic_warmup(name)
        steps = recipe.steps - before
        warmup = role.optimizer.warmup_steps if role.optimizer else 0
        if warmup > steps:
            path = f"roles.{name}.optimizer.warmup_steps"
            fact = f"{warmup} steps are longer than the run, which trains '{name}' for {steps}"
            raise RecipeError(path, fact, fix=f"{path}={steps} or less, or steps={before + warmup} or more")


def _check_size(recipe: Recipe, node: GraphNode, operation: Generate) -> None:
    rows = recipe.data.batch_size * operation.group_size
    if rows > _MAX_ROWS:
        fact = f"{operation.group_size} responses to each of {recipe.data.batch_size} prompts are more than {_MAX_ROWS}"
        raise GraphError(f"graph.{node.name}.group_size", fact, fix="smaller groups, or a smaller data.batch_size")


def _check_evaluation_size(recipe: Recipe) -> None:
    """Raise RecipeError for an evaluation with more responses than arrays have rows."""
    options = recipe.evaluation
    sets = options.sets_with(recipe.data.eval_split) if options else {}
    for name, each in sets.items():
        assert options is not None
        prompts, responses = options.prompts_of(each), options.responses_of(each)
        if prompts * responses > _MAX_ROWS:
            path = f"evaluation.sets.{name}" if name else "evaluation"
            fact = f"{responses} responses to each of {prompts} prompts are more than {_MAX_ROWS}"
            raise RecipeError(f"{path}.num_responses", fact, fix=f"fewer responses, or a smaller {path}.num_prompts")


def _check_minibatches(recipe: Recipe, node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError for a node that divides a step among more optimizer steps than it has samples."""
    minibatches = getattr(node.operation, "num_minibatches", 1)
    generators = (each.operation for each in _generators(node.inputs.get("rollouts", ""), nodes))
    sizes = [each.group_size for each in generators if isinstance(each, Generate)]
    samples = recipe.data.batch_size * (sum(sizes) or 1)
    if minibatches > samples:
        fact = f"{minibatches} minibatches are more than the {samples} samples of a step"
        raise GraphError(f"graph.{node.name}.num_minibatches", fact, fix=f"use {samples} or fewer")


def _generators(origin: str, nodes: Mapping[str, GraphNode]) -> Iterator[GraphNode]:
    """Yield the nodes that generate the rollouts of the node ``origin``, which may only select them."""
    if origin in nodes:
        node = nodes[origin]
        if isinstance(node.operation, Generate):
            yield node
        else:
            yield from _generators(node.inputs.get("rollouts", ""), nodes)


def _check_sampling(recipe: Recipe, update: GraphNode, generator: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Check the node that generates what a policy trains on."""
    role, trained, operation = str(generator.role), str(update.role), generator.operation
    if role != trained and recipe.roles[role].follows != trained:
        fact = f"graph.{update.name} trains '{trained}' on responses of '{role}', which never gets its weights"
        raise RecipeError(f"roles.{role}.follows", fact, fix=f"roles.{role}.follows={trained}")
    assert isinstance(operation, Generate)
    if operation.temperature == 0:
        fact = f"with 0 all responses to a prompt are the same, and graph.{update.name} learns from their differences"
        operations = {name: each.operation for name, each in nodes.items()}
        others = [name for name, each in operations.items() if isinstance(each, Generate) and each.temperature > 0]
        fix = f"graph.{update.name}.rollouts={others[0]}" if others else f"graph.{generator.name}.temperature=1"
        raise GraphError(f"graph.{generator.name}.temperature", fact, fix=fix)


def _check_warmup(graph: Graph, node: GraphNode, update: PolicyGradient) -> None:
    """Raise GraphError for first steps that train only a critic, in a graph that trains nothing else."""
    if update.critic_warmup and graph.trained_roles() == [node.role]:
        path = f"graph.{node.name}.critic_warmup"
        fact = f"{update.critic_warmup} steps would train nothing: no node trains a critic"
        raise GraphError(path, fact, fix=f"{path}=0, or roles.{node.role}.optimizer.warmup_steps")


def _check_environment(node: GraphNode, reward: Reward, generator: GraphNode) -> None:
    """Raise GraphError for rewards of an environment where no environment gives any."""
    assert isinstance(generator.operation, Generate)
    for name, term in reward.terms.items():
        if (term.function or name) == "environment" and not generator.operation.gives_rewards:
            path = f"graph.{node.name}.function" if reward.function else f"graph.{node.name}.functions.{name}"
            fact = f"no environment gives rewards to the responses of graph.{generator.name}"
            raise GraphError(path, fact, fix="another function, or a node 'converse' whose environment gives rewards")


def _check_baseline(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError for a greedy response that is scored in another way, or cut at another length."""
    rewards, greedy_rewards = (_scoring(node.inputs[name], nodes) for name in ("rewards", "greedy_rewards"))
    if _measure(rewards) != _measure(greedy_rewards):
        fact = f"scores the greedy response in another way than graph.{rewards.name} scores the others"
        raise GraphError(f"graph.{greedy_rewards.name}", fact, fix=f"the same options as in graph.{rewards.name}")
    sampled, greedy = (_generators(node.inputs[name], nodes) for name in ("rollouts", "greedy"))
    for other, baseline in product(sampled, greedy):
        assert isinstance(other.operation, Generate)
        assert isinstance(baseline.operation, Generate)
        if (actual := baseline.operation.max_tokens) != (expected := other.operation.max_tokens):
            path = f"graph.{baseline.name}.max_tokens"
            fact = f"{actual} differs from graph.{other.name}.max_tokens, which is {expected}"
            raise GraphError(path, fact, fix=f"{path}={expected}")


def _scoring(origin: str, nodes: Mapping[str, GraphNode]) -> GraphNode:
    """Return the node that scores responses for the node ``origin``, which may only subtract penalties."""
    node = nodes[origin]
    return _scoring(node.inputs["rewards"], nodes) if "rewards" in node.inputs else node


def _measure(node: GraphNode) -> object:
    """Return what two nodes have in common if they give the same rewards."""
    return node.role, node.operation.terms if isinstance(node.operation, Reward) else node.operation


def _check_teacher(recipe: Recipe, graph: Graph, node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise RecipeError for a teacher that starts with the weights of the policy, which always agree."""
    teacher = nodes.get(node.inputs.get("teacher", ""))
    if teacher is None or teacher.role is None:
        return
    name = recipe.roles[teacher.role].model
    for update in graph.nodes:
        if isinstance(update.operation, PolicyGradient) and node.name in update.inputs.values():
            if teacher.role == update.role:
                fact = f"the policy '{update.role}' would be its own teacher, so that there is nothing to learn from it"
                raise GraphError(f"graph.{teacher.name}.role", fact, fix="a role of its own, with a better model")
            other = recipe.roles[str(update.role)].model
            model, policy = recipe.models[name], recipe.models[other]
            if name == other or (not model.random_weights and _source(model) == _source(policy)):
                fact = f"has the weights with which '{update.role}' starts, so that there is nothing to learn from it"
                raise RecipeError(f"roles.{teacher.role}.model", fact, fix="name a better model")


def _source(model: Model) -> object:
    return model.path, model.recipe


def _check_penalty(node: GraphNode, penalty: OverlongPenalty, generator: GraphNode) -> None:
    """Raise RecipeError for a limit that no response reaches, so that the penalty is smaller than meant or zero."""
    assert isinstance(generator.operation, Generate)
    if penalty.max_tokens > (limit := generator.operation.max_tokens):
        fact = f"{penalty.max_tokens} is more than graph.{generator.name}.max_tokens, which is {limit}"
        raise RecipeError(f"graph.{node.name}.max_tokens", fact, fix=f"graph.{node.name}.max_tokens={limit}")


def _check_reference(recipe: Recipe, graph: Graph, reference: GraphNode) -> None:
    """Raise RecipeError or GraphError for a reference that changes with the policy, so that they never differ."""
    role = str(reference.role)
    if "Scores" not in reference.capabilities:
        return
    if (trained := recipe.roles[role].follows) is not None:
        fact = f"the reference would get the weights of '{trained}' after every step, so that they never differ"
        raise RecipeError(f"roles.{role}.follows", fact, fix=f"roles.{role}.follows=null")
    if role in graph.trained_roles():
        fact = f"the role '{role}' is trained, so it cannot be its own reference"
        fix = "a role of its own with the same model; with adapters, node: base_logprobs"
        raise GraphError(f"graph.{reference.name}.role", fact, fix=fix)
