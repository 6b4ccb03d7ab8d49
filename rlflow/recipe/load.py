"""The stage load: checks a configuration and builds its recipe."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlflow.errors import RecipeError, below, did_you_mean
from rlflow.recipe import Model, Recipe
from rlflow.recipe.arguments import SHORT_KEYS
from rlflow.recipe.interpolations import to_mapping
from rlflow.recipe.recipe import NUM_BYTE_TOKENS
from rlflow.resources.models.architecture import check, check_new
from rlflow.resources.models.config import check_agreement, read_architecture
from rlflow.resources.time.lengths import past_lengths
from rlflow.schema import nested, parse

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")

# The keys that a model may have beside the source of its weights. ``dtype`` fits all.
_KEYS_BESIDE: Mapping[str, Collection[str]] = {
    "path": ("architecture", "architecture_of", "trust_remote_code"),
    "recipe": (),
    "random_weights": ("architecture", "characters", "tokenizer"),
}


def load(config: DictConfig, load_parent: Callable[[str], Mapping[str, Any]]) -> Recipe:
    """Check a composed configuration and return its recipe. Raises RecipeError.

    ``load_parent`` returns the recipe that ``models.<name>.recipe`` names, as a mapping.
    """
    mapping = to_mapping(config)
    _check_keys(mapping)
    models = mapping.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        if isinstance(model, dict) and isinstance(model.get("recipe"), str):
            with below(f"models.{name}"):
                model["recipe"] = load_parent(model["recipe"])
    expect = mapping.get("expect")
    if isinstance(expect, dict) and isinstance(folder := expect.get("response_tokens"), str) and folder != "auto":
        expect["response_tokens"] = list(past_lengths(folder, "expect.response_tokens"))
    return _with_architectures(recipe_from(mapping))


def _check_keys(mapping: Mapping[str, Any]) -> None:
    """Raise RecipeError for a top-level key that belongs deeper, and for keys of a missing role or node."""
    known = [entry.name for entry in fields(Recipe)]
    for key in mapping.keys() - set(known):
        if key in SHORT_KEYS:
            fix = f"write {nested(SHORT_KEYS[key])}; only the command line has short keys"
            raise RecipeError(key, "unknown key", known=sorted(known), fix=fix)
        if paths := sorted(_paths(mapping, key)):
            raise RecipeError(key, "unknown key", known=sorted(known), fix=f"did you mean {' or '.join(paths)}?")
    for section, kind, required in (("roles", "role", "model"), ("graph", "node", "node")):
        value = mapping.get(section)
        entries: dict[str, Any] = value if isinstance(value, dict) else {}
        for name, entry in entries.items():
            if isinstance(entry, dict) and required not in entry and not (section == "roles" and "engine" in entry):
                siblings = {sibling: other for sibling, other in entries.items() if sibling != name}
                new = f"remove it, or add {section}.{name}.{required}=..., for a new {kind}"
                fix = _fix_for_missing(section, name, entry, siblings) or new
                raise RecipeError(f"{section}.{name}", f"the recipe has no {kind} '{name}'", known=siblings, fix=fix)


def _fix_for_missing(section: str, name: str, entry: Mapping[str, Any], siblings: Mapping[str, Any]) -> str | None:
    """Return the fix for keys of a missing role or node: the one that is meant, if it can be known."""
    owner, _, rest = name.partition(".")
    if owner in siblings:
        return f"a key in a file has no dots: write {nested(f'{owner}.{rest}')}"
    if near := did_you_mean(name, siblings):
        return near
    path, value = "", entry
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        path += f".{key}"
    having = [
        sibling for sibling, other in siblings.items() if isinstance(other, dict) and entry.keys() <= other.keys()
    ]
    return f"did you mean {section}.{having[0]}{path}?" if path and len(having) == 1 else None


def _paths(mapping: Mapping[str, Any], key: str, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all entries named ``key`` below the top level of ``mapping``."""
    for name, value in mapping.items():
        if isinstance(value, dict):
            if key in value:
                yield f"{prefix}{name}.{key}"
            yield from _paths(value, key, f"{prefix}{name}.")


def _with_architectures(recipe: Recipe) -> Recipe:
    """Complete missing architectures from the ``config.json`` of models on this machine. Raises RecipeError.

    An architecture that the recipe gives must agree with the file. A saved plan skips this step, because it keeps
    the sizes that it was made with.
    """
    for name, model in recipe.models.items():
        if model.path is not None and model.architecture is not None:
            check_agreement(model.architecture, model.architecture_of, model.path, f"models.{name}")
    architectures = {
        name: read_architecture(model.path, f"models.{name}.path")
        for name, model in recipe.models.items()
        if model.path is not None and model.architecture is None
    }
    models = {
        name: replace(model, architecture=architectures[name])
        for name, model in recipe.models.items()
        if name in architectures
    }
    return replace(recipe, models={**recipe.models, **models}) if models else recipe


def recipe_from(mapping: Mapping[str, Any]) -> Recipe:
    """Return the recipe in a mapping that comes from a YAML file or a plan.json. Raises RecipeError."""
    recipe = parse(Recipe, mapping, "")
    _check_names(recipe)
    if recipe.elastic and not recipe.max_restarts:
        fact = "continues on other hosts by going back to a checkpoint, which max_restarts=0 forbids"
        raise RecipeError("elastic", fact, fix="max_restarts=2, or elastic=false")
    for name, model in recipe.models.items():
        sources = [key for key in ("path", "recipe", "random_weights") if getattr(model, key)]
        if len(sources) != 1:
            raise RecipeError(
                f"models.{name}",
                f"expected exactly one source of weights, got {' and '.join(sources) or 'none'}",
                known=("path", "recipe", "random_weights"),
                fix="keep one, and set the others to null",
            )
        _check_model_keys(f"models.{name}", model, sources[0])
        if model.architecture is not None:
            check(model.architecture, f"models.{name}.architecture")
        if model.random_weights:
            _check_new_model(f"models.{name}", model)
    return recipe


def _check_new_model(path: str, model: Model) -> None:
    """Raise RecipeError for a model with random weights whose architecture or tokens are missing or do not fit."""
    if model.architecture is None or (model.characters is None) == (model.tokenizer is None):
        fact = "also needs 'architecture', and either 'characters' or 'tokenizer'"
        raise RecipeError(f"{path}.random_weights", fact, fix="tokenizer: bytes suits any text; or start from a path")
    check_new(model.architecture, f"{path}.architecture")
    num_tokens, tokens = NUM_BYTE_TOKENS, f"the {NUM_BYTE_TOKENS} tokens of tokenizer: {model.tokenizer}"
    if model.characters is not None:
        num_tokens = len(set(model.characters)) + 1
        tokens = f"{num_tokens - 1} characters and the end token"
        if model.architecture.vision is not None:
            of_images = len(model.architecture.vision.tokens)
            num_tokens, tokens = num_tokens + of_images, f"{tokens}, and {of_images} tokens for images"
    elif model.architecture.vision is not None:
        fact = "has no tokens for images"
        raise RecipeError(f"{path}.tokenizer", fact, fix=f"use {path}.characters in its place")
    if num_tokens > model.architecture.vocab_size:
        fact = f"{model.architecture.vocab_size} is too small for {tokens}"
        raise RecipeError(f"{path}.architecture.vocab_size", fact, fix=f"vocab_size {num_tokens}")


def _check_model_keys(path: str, model: Model, source: str) -> None:
    """Raise RecipeError for a key of a model that has no effect or contradicts the source of its weights."""
    known = {key for keys in _KEYS_BESIDE.values() for key in keys}
    if idle_keys := sorted(key for key in known - {*_KEYS_BESIDE[source]} if getattr(model, key)):
        fact = f"has no effect on a model whose weights come from '{source}'"
        fix = " ".join(f"{path}.{key}={'false' if key == 'trust_remote_code' else 'null'}" for key in idle_keys)
        raise RecipeError(f"{path}.{idle_keys[0]}", fact, fix=fix)


def _check_names(recipe: Recipe) -> None:
    """Raise RecipeError for a name that is not safe as the name of a file or folder."""
    names = [("name", recipe.name)]
    sections: dict[str, Iterable[str]] = {"models": recipe.models, "roles": recipe.roles, "graph": recipe.graph}
    if recipe.evaluation is not None:
        sections["evaluation.sets"] = recipe.evaluation.sets
    names += [(section, name) for section, entries in sections.items() for name in entries]
    for where, name in names:
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise RecipeError(
                where,
                f"{name!r} is not a valid name: files and folders are named after it",
                fix="use 1 to 100 letters, digits, '_', '-' and '.'",
            )


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML, with all references resolved."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(recipe)))
