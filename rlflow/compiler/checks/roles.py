"""Rules about roles: their models, engines and options, against the nodes that use them."""

from collections.abc import Iterable

from rlflow.compiler.graph import Graph
from rlflow.compiler.models import role_architecture, routing_bytes
from rlflow.engines.base import choose_head
from rlflow.engines.registry import engine_kind, engine_names
from rlflow.errors import GraphError, RecipeError, did_you_mean
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe, Role
from rlflow.resources.models.lora import LORA_RANKS
from rlflow.resources.models.vision import trains_images

# Language models can have adapters. Other heads are new, and would have to be trained as well.
_LORA_CAPABILITIES = {"Trains", "Scores", "ScoresBase"}


def check_heads(recipe: Recipe, graph: Graph) -> None:
    """Check that the nodes of each role ask for the same output head."""
    heads: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        if node.role is None:
            continue
        needed = choose_head(node.capabilities)
        other, head = heads.setdefault(node.role, (node.name, needed))
        if head != needed:
            fact = f"graph.{other} needs '{node.role}' to have a {head} head, and this node needs a {needed} head"
            raise GraphError(f"graph.{node.name}.role", fact, fix="two roles")


def check_roles(recipe: Recipe, graph: Graph) -> None:
    """Check the models, engines and options of all roles. Raises RecipeError and GraphError."""
    trained = graph.trained_roles()
    if not trained:
        raise GraphError("graph", "no node trains a role", fix="add one, as update: {node: policy_update, role: actor}")
    for name, role in recipe.roles.items():
        path = f"roles.{name}"
        _check_name(f"{path}.model", "model", role.model, recipe.models)
        _check_name(f"{path}.engine", "engine", role.engine, engine_names())
        _check_colocate(f"{path}.colocate", name, role, recipe)
        nodes = [node for node in graph.nodes if node.role == name]
        if not nodes:
            raise GraphError(path, "no node uses this role", fix=f"remove it, or give a node role: {name}")
        for node in nodes:
            _check_capability(path, role.engine, node)
        if role.optimizer is not None and name not in trained:
            raise GraphError(f"{path}.optimizer", f"'{name}' is never trained", fix=_fix_untrained(name, graph))
        _check_optimizer(path, role)
        if role.offload == "optimizer" and name not in trained:
            fact = f"'{name}' is never trained, so it has no optimizer state"
            raise GraphError(f"{path}.offload", fact, fix=f"{path}.offload=auto, or weights")
        _check_lora(recipe, graph, name, role)
        _check_routing(recipe, graph, name)
        if trains_images(role.train) and (role.lora is not None or name not in graph.trained_roles()):
            why = "adapters are in the language part alone" if role.lora else "the role is never trained"
            raise GraphError(f"roles.{name}.train", why, fix="remove it")
        if trains_images(role.train) and not engine_kind(role.engine).trains_vision:
            fact = f"'{role.engine}' trains the language part of a model alone"
            known = [engine for engine in engine_names() if engine_kind(engine).trains_vision]
            raise GraphError(f"roles.{name}.train", fact, fix=f"train: language, or engine: {' or '.join(known)}")
        if role.follows is not None:
            _check_follows(recipe, name, role.follows, trained)


def _check_optimizer(path: str, role: Role) -> None:
    if role.optimizer is None or role.optimizer.kind == "adamw":
        return
    if role.lora is not None:
        fact = f"'{role.optimizer.kind}' trains whole matrices, not adapters"
        raise GraphError(f"{path}.optimizer.kind", fact, fix="kind: adamw")
    if role.optimizer.kind in engine_kind(role.engine).optimizers:
        return
    known = [engine for engine in engine_names() if role.optimizer.kind in engine_kind(engine).optimizers]
    fact = f"engine '{role.engine}' does not have '{role.optimizer.kind}'"
    raise GraphError(f"{path}.optimizer.kind", fact, fix=f"kind: adamw, or engine: {' or '.join(known)}")


def _fix_untrained(name: str, graph: Graph) -> str:
    """Return the fix for an optimizer of a role that no node trains: the node that most likely is missing, if any."""
    capabilities = graph.capabilities(name)
    for capability, kind in (("Values", "value_update"), ("Evaluates", "reward_model_update")):
        if capability in capabilities:
            return f"add graph.{kind}={{node: {kind}, role: {name}}}, or remove the optimizer"
    return "remove it"


def _check_colocate(path: str, name: str, role: Role, recipe: Recipe) -> None:
    neighbors = () if isinstance(role.colocate, str) else role.colocate
    for other in neighbors:
        _check_name(path, "role", other, recipe.roles)
    if len(set(neighbors)) < len(neighbors):
        raise RecipeError(path, "names a role more than once", fix=f"{path}=[{','.join(dict.fromkeys(neighbors))}]")
    if neighbors == (name,):
        raise RecipeError(path, "names no other role", fix="name roles that share its GPUs, or [] for none")


def _check_name(path: str, what: str, name: str, known: Iterable[str]) -> None:
    if name not in (names := list(known)):
        raise RecipeError(path, f"no {what} '{name}'", known=names, fix=did_you_mean(name, names) or "one of these")


def _check_capability(path: str, engine: str, node: GraphNode) -> None:
    provided, needed = engine_kind(engine).capabilities, node.capabilities
    if not needed <= provided:
        raise GraphError(
            f"{path}.engine",
            f"'{engine}' cannot do what graph.{node.name} needs, {' and '.join(sorted(needed))}; "
            f"it can {', '.join(sorted(provided))}",
            known=[name for name in engine_names() if needed <= engine_kind(name).capabilities],
            fix="one of the known engines",
        )


def _check_lora(recipe: Recipe, graph: Graph, name: str, role: Role) -> None:
    """Check that adapters are trained and suffice, and that they exist where a node asks for the base model."""
    path, capabilities = f"roles.{name}", graph.capabilities(name)
    model = role_architecture(recipe, graph, name)
    uncovered = sorted(capabilities - _LORA_CAPABILITIES)
    fix = "remove it"
    if role.lora is None:
        if "ScoresBase" not in capabilities:
            return
        fact = "is missing, and a node asks for the logprobs of the role's model without its adapters"
        fix = f"{path}.lora={{}}, or node: logprobs with a role of its own"
    elif name not in graph.trained_roles():
        fact, fix = "the role is never trained", "remove it; a role that follows another one uses its adapters"
    elif uncovered:
        fact = f"the role's engine must do {', '.join(uncovered)}, and adapters do not cover the head for that"
    elif role.lora.experts and model is not None and not model.num_experts:
        fact, fix = f"asks for adapters of experts, and a {model.model_type} has none", f"{path}.lora.experts=false"
    else:
        return
    raise GraphError(f"{path}.lora", fact, fix=fix)


def _check_routing(recipe: Recipe, graph: Graph, name: str) -> None:
    """Check that a sampler can record the experts of its tokens, and a trained role use them."""
    if not routing_bytes(recipe, graph, name):
        return
    role = recipe.roles[name]
    option = f"roles.{role.follows or name}.routing_replay"
    if not engine_kind(role.engine).routing_replay:
        known = [engine for engine in engine_names() if engine_kind(engine).routing_replay]
        what = "tell the experts of a token" if role.follows else "use the experts of the sampler"
        fact = f"'{role.engine}' cannot {what}, which {option} needs"
        raise GraphError(f"roles.{name}.engine", fact, known=known, fix=f"one of the known engines, or {option}=false")
    if role.follows and role.pipeline_parallel_size not in ("auto", 1):
        path, fact = f"roles.{name}.pipeline_parallel_size", f"stages do not know all experts, which {option} needs"
        raise GraphError(path, fact, fix=f"{path}=1, or {option}=false")


def _check_follows(recipe: Recipe, name: str, leader: str, trained: list[str]) -> None:
    path = f"roles.{name}.follows"
    if leader not in trained:
        fact = f"'{leader}' is never trained" if leader in recipe.roles else f"no role '{leader}'"
        raise GraphError(path, fact, known=trained, fix=did_you_mean(leader, trained) or "a trained role")
    if recipe.roles[leader].model != recipe.roles[name].model:
        models = f"'{name}' has the model '{recipe.roles[name].model}', '{leader}' has '{recipe.roles[leader].model}'"
        raise GraphError(path, models, fix="the same model for both")
    engine, lora = recipe.roles[name].engine, recipe.roles[leader].lora
    if "Follows" not in engine_kind(engine).capabilities:
        fact = f"engine '{engine}' cannot load the weights of another role while it runs"
        raise GraphError(path, fact, fix=f"{path}=null, or another engine")
    if lora is None or lora.merge or not engine_kind(engine).concurrent:
        return
    if lora.experts:
        fact = f"'{engine}' of role '{name}' does not run adapters of experts beside its model"
        raise GraphError(f"roles.{leader}.lora.experts", fact, fix=f"roles.{leader}.lora.merge=true")
    if lora.rank > LORA_RANKS[-1]:
        path = f"roles.{leader}.lora.rank"
        fact = f"{lora.rank} is more than {LORA_RANKS[-1]}, the highest rank that '{engine}' of role '{name}' supports"
        raise GraphError(path, fact, fix=f"{path}={LORA_RANKS[-1]}, or roles.{name}.engine=transformers")
