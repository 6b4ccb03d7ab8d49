"""What a person writes for one run, and load(), which checks it. The only file that sees OmegaConf."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Lt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlflow.errors import RecipeError, below, did_you_mean
from rlflow.resources.layout import Resources
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.config import architecture_of_path, check_agreement
from rlflow.resources.models.figures import check
from rlflow.resources.models.lora import Lora
from rlflow.resources.time.lengths import past_lengths
from rlflow.schema import Count, Section, parse

Size = Annotated[float, Ge(0)]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
# Of a run: whether sizes that its recipe leaves open are tuned, and whether throughout.
Tune = bool | Literal["adaptive"]


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Weights and tokenizer, from exactly one of ``path``, ``recipe`` and ``random_weights``."""

    path: str | None = None
    """A folder, or a name on the Hugging Face hub."""
    recipe: "Recipe | None" = None
    """The model that this recipe makes. It is run when its result is not in the cache. Written as a name."""
    random_weights: bool = False
    """New weights by ``architecture``, with a tokenizer of single ``characters``."""
    characters: str | None = None
    architecture: Architecture | None = None
    """The figures that planning needs. A card of conf/model has them, and so has the ``config.json`` at ``path``."""
    architecture_of: str | None = None
    """The model on the hub that the figures of a card belong to. They must be those of the model at ``path``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    trust_remote_code: bool = False
    """Run the Python files at ``path`` that its ``auto_map`` names, with the rights of the user."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW, its learning rate a function of the step alone."""

    learning_rate: Annotated[float, Gt(0)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at the last step."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    weight_decay: Size = 0.0
    max_grad_norm: Annotated[float, Gt(0)] = 1.0

    def learning_rate_at(self, step: int, steps: int) -> float:
        """At ``step``, counted from 0, of ``steps``; 0 before the first."""
        if step < 0:
            return 0.0
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * left


@dataclass(frozen=True, kw_only=True)
class Role(Resources):
    """A model doing one job."""

    model: str
    engine: str
    follows: str | None = None
    """The trained role whose weights this one takes over after every step."""
    optimizer: Optimizer | None = None
    """Of a trained role."""
    lora: Lora | None = None
    """Of a trained role: adapters are trained in place of its weights."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Where prompts come from."""

    source: str
    """A JSONL or Parquet file, a folder of them, a data set on the hub, or ``package.module:function``."""
    name: str | None = None
    """The configuration of a data set on the hub."""
    split: str = "train"
    eval_split: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """From the names used here (``prompt``, ``response``, for pairs ``chosen`` and ``rejected``, and those that the
    reward reads) to the data set's own."""
    system_prompt: str | None = None
    """Put before every prompt where the tokenizer has a chat template; not before messages that have their own."""
    batch_size: Count
    """Rows a step."""
    max_prompt_tokens: Count
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """The treatment of prompts with more tokens: end the run, leave their rows out, or keep their last tokens."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Greedy decoding of held-out prompts, scored by the graph's own reward; where pairs are trained on, how often the
    chosen response of held-out ones is preferred."""

    every: Count
    """Steps between two; the first is before training, the last after it."""
    num_prompts: Count
    """The first so many of the held-out rows."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Section):
    every: Count
    """Steps between two; the last is at the end of the run."""
    keep: Count = 2


Expected = Annotated[float, Gt(0)] | tuple[float, ...] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Expect(Section):
    """What planning reckons with: a mean, or lengths that are equally likely. It does not change the run.

    In a file ``response_tokens`` may name the folder of a past run, whose lengths are then taken.
    """

    prompt_tokens: Expected = "auto"
    response_tokens: Expected = "auto"
    rounds: Annotated[float, Ge(1)] = 1.0
    """Where a node ``dynamic_sampling`` asks for more prompts: how many are answered for each that is trained on."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    name: str
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    steps: Count
    models: Mapping[str, Model]
    roles: Mapping[str, Role]
    graph: Mapping[str, Mapping[str, Any]]
    """Each node's kind, role, options and inputs; ``wire`` reads them."""
    data: Data
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints
    expect: Expect = Expect()

    def lora_of(self, role: str) -> Lora | None:
        """A role's adapters: its own, or those of the role that it follows."""
        return self.roles[self.roles[role].follows or role].lora


def load(config: DictConfig, recipe_named: Callable[[str], Mapping[str, Any]]) -> Recipe:
    """Checks the recipe's part of a composed configuration.

    ``recipe_named`` gives the parts of the recipe that ``models.<name>.recipe`` names. Raises RecipeError.
    """
    mapping = plain(config)
    _check_places(mapping)
    models = mapping.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        if isinstance(model, dict) and isinstance(model.get("recipe"), str):
            with below(f"models.{name}"):
                model["recipe"] = recipe_named(model["recipe"])
    expect = mapping.get("expect")
    if isinstance(expect, dict) and isinstance(folder := expect.get("response_tokens"), str) and folder != "auto":
        expect["response_tokens"] = list(past_lengths(folder, "expect.response_tokens"))
    return _with_architectures(recipe_from(mapping))


def _check_places(mapping: Mapping[str, Any]) -> None:
    """Raises RecipeError for a key without its path, and for a key below a role or a node that does not exist."""
    known = [entry.name for entry in fields(Recipe)]
    for key in mapping.keys() - set(known):
        if places := sorted(_paths(mapping, key)):
            raise RecipeError(key, "unknown key", known=sorted(known), fix=f"did you mean {' or '.join(places)}?")
    for section, what, needed in (("roles", "role", "model"), ("graph", "node", "node")):
        entries: dict[str, Any] = found if isinstance(found := mapping.get(section), dict) else {}
        for name, entry in entries.items():
            if isinstance(entry, dict) and needed not in entry and not (section == "roles" and "engine" in entry):
                others = [each for each in entries if each != name]
                fix = did_you_mean(name, others) or f"{section}.{name}.{needed}=..., for a new {what}"
                raise RecipeError(f"{section}.{name}", f"the recipe has no {what} '{name}'", known=others, fix=fix)


def _paths(mapping: Mapping[str, Any], key: str, above: str = "") -> Iterator[str]:
    """Yield the paths of all entries below the top of ``mapping`` that are called ``key``."""
    for name, value in mapping.items():
        if isinstance(value, dict):
            if key in value:
                yield f"{above}{name}.{key}"
            yield from _paths(value, key, f"{above}{name}.")


def _with_architectures(recipe: Recipe) -> Recipe:
    """Return the recipe with the figures of models at a path from their ``config.json``, where it gives none and the
    file is on this machine. Figures that it gives must be the same. Raises RecipeError.

    This is not done when a plan is read: it holds what was known when it was made.
    """
    for name, model in recipe.models.items():
        if model.path is not None and model.architecture is not None:
            check_agreement(model.architecture, model.architecture_of, model.path, f"models.{name}")
    found = {
        name: architecture_of_path(model.path, f"models.{name}.path")
        for name, model in recipe.models.items()
        if model.path is not None and model.architecture is None
    }
    models = {name: replace(model, architecture=found[name]) for name, model in recipe.models.items() if name in found}
    return replace(recipe, models={**recipe.models, **models}) if models else recipe


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration with its interpolations resolved, as dicts and lists."""
    try:
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise RecipeError(str(error.full_key), "is missing") from None
    except OmegaConfBaseException as error:
        place = str(error.full_key or "recipe")
        raise RecipeError(place, str(error.msg or error).splitlines()[0].rstrip(".")) from None
    return cast(dict[str, Any], container)


def recipe_from(mapping: Mapping[str, Any]) -> Recipe:
    """The recipe in ``mapping``, as a YAML file or a plan.json holds it. Raises RecipeError."""
    recipe = parse(Recipe, mapping, "")
    _check_names(recipe)
    for name, model in recipe.models.items():
        given = [key for key in ("path", "recipe", "random_weights") if getattr(model, key)]
        if len(given) != 1:
            raise RecipeError(
                f"models.{name}",
                f"needs exactly one source of weights, has {' and '.join(given) or 'none'}",
                known=("path", "recipe", "random_weights"),
            )
        if model.random_weights and (model.architecture is None or model.characters is None):
            raise RecipeError(f"models.{name}.random_weights", "needs 'architecture' and 'characters' beside it")
        if model.architecture is not None:
            check(model.architecture, f"models.{name}.architecture")
        tokens, figures = len(set(model.characters or "")) + 1, model.architecture
        if model.random_weights and figures and tokens > figures.vocab_size:
            raise RecipeError(
                f"models.{name}.architecture.vocab_size",
                f"{figures.vocab_size} is too small for {tokens - 1} characters and the end token",
                fix=f"vocab_size {tokens}",
            )
    return recipe


def _check_names(recipe: Recipe) -> None:
    """Raise RecipeError for a name that leads out of the folder that a run gives it."""
    names = [("name", recipe.name)]
    sections = {"models": recipe.models, "roles": recipe.roles, "graph": recipe.graph}
    names += [(section, name) for section, entries in sections.items() for name in entries]
    for where, name in names:
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise RecipeError(
                where,
                f"{name!r} is not a name, because files and folders are called after it",
                fix="1 to 100 letters, digits, '_', '-' and '.'",
            )


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(recipe)))
