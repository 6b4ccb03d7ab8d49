"""The recipe of one run as dataclasses, and ``load``, which checks a configuration and builds them.

The rest of the pipeline sees these dataclasses and never OmegaConf.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf

from rlflow.errors import RecipeError, below, did_you_mean
from rlflow.interpolations import to_mapping
from rlflow.resources.layout import Resources
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.config import check_agreement, read_architecture
from rlflow.resources.models.figures import check
from rlflow.resources.models.lora import Lora
from rlflow.resources.time.lengths import past_lengths
from rlflow.resources.workload import Overlap
from rlflow.schema import Count, CountOrZero, Section, Text, parse

Size = Annotated[float, Ge(0)]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
# A run with ``tune`` adjusts the sizes that its recipe leaves open; "adaptive" keeps tuning them throughout the run.
Tune = bool | Literal["adaptive"]


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Weights and tokenizer, from exactly one of ``path``, ``recipe`` and ``random_weights``."""

    path: str | None = None
    """A folder, or a name on the Hugging Face hub."""
    recipe: "Recipe | None" = None
    """A recipe, by its name, that trains this model. It runs first unless its result is in the cache."""
    random_weights: bool = False
    """Initialize random weights of ``architecture``, with a tokenizer whose tokens are ``characters``."""
    characters: Text | None = None
    architecture: Architecture | None = None
    """The sizes that planning needs. They come from conf/model or from the ``config.json`` at ``path``."""
    architecture_of: str | None = None
    """The model on the hub that ``architecture`` describes. The model at ``path`` must have the same sizes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    trust_remote_code: bool = False
    """Run the Python files at ``path`` that its ``auto_map`` names, with the rights of the user."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW with a learning rate that depends only on the step."""

    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to zero at the last step."""
    warmup_steps: CountOrZero = 0
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    weight_decay: Annotated[float, Ge(0), Le(10)] = 0.0
    max_grad_norm: Annotated[float, Gt(0)] = 1.0

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate at ``step`` of ``steps``, counted from 0; negative steps have 0."""
        if step < 0:
            return 0.0
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        factor = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * factor


@dataclass(frozen=True, kw_only=True)
class Role(Resources):
    """A model doing one job."""

    model: str
    engine: str
    follows: str | None = None
    """The trained role whose weights this role receives after every step."""
    optimizer: Optimizer | None = None
    """The optimizer of a trained role."""
    lora: Lora | None = None
    """Adapters of a trained role, which are trained instead of its weights."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """The data set that prompts come from."""

    source: Text
    """A JSONL or Parquet file, a folder of them, a data set on the hub, or ``package.module:function``."""
    name: str | None = None
    """The configuration of a data set on the hub."""
    split: Text = "train"
    eval_split: Text | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The data set's column for each name used here: ``prompt``, ``response``, for pairs ``chosen`` and ``rejected``,
    and the names that the reward reads."""
    system_prompt: str | None = None
    """The system message of every prompt that has none of its own. The tokenizer needs a chat template."""
    batch_size: Count
    """Prompts, examples or pairs in each step."""
    max_prompt_tokens: Count
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """Handling of prompts with more tokens: end the run, drop their rows, or keep only their last tokens."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Evaluation on held-out rows: greedy responses scored by the graph's reward, or the accuracy on pairs.

    The accuracy is the share of pairs whose chosen response the model prefers.
    """

    every: Count
    """Steps between two evaluations. The first is before training and the last after it."""
    num_prompts: Count
    """The number of held-out rows, taken from the beginning of the split."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Section):
    """The checkpoints of a run."""

    every: Count
    """Steps between two checkpoints. The last is at the end of the run."""
    keep: Count = 2
    """The number of newest checkpoints that are not deleted."""


Expected = Annotated[float, Gt(0), Le(2**31 - 1)] | tuple[Annotated[float, Le(2**31 - 1)], ...] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Expect(Section):
    """Expected lengths for planning: a mean, or a list of equally likely lengths. They do not change the run.

    Lengths beyond the limit end there. In a file, ``response_tokens`` may also name the folder of an earlier run, whose
    lengths are used.
    """

    prompt_tokens: Expected = "auto"
    response_tokens: Expected = "auto"
    rounds: Annotated[float, Ge(1)] = 1.0
    """Prompts that ``dynamic_sampling`` generates for, per prompt that is trained on."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """Everything that defines one run."""

    name: str
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    steps: Count
    models: Mapping[str, Model]
    roles: Mapping[str, Role]
    graph: Mapping[str, Mapping[str, Any]]
    """The kind, role, options and inputs of each node. The stage ``wire`` reads them."""
    data: Data
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints
    expect: Expect = Expect()
    overlap: Overlap = field(default_factory=Overlap)
    stop_after_skipped_steps: Count = 3
    """The number of steps in a row after which the run stops that were skipped for values that are not finite."""

    def lora_of(self, role: str) -> Lora | None:
        """Return a role's adapters: its own, or those of the role that it follows."""
        return self.roles[self.roles[role].follows or role].lora


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
        if paths := sorted(_paths(mapping, key)):
            raise RecipeError(key, "unknown key", known=sorted(known), fix=f"did you mean {' or '.join(paths)}?")
    for section, kind, required in (("roles", "role", "model"), ("graph", "node", "node")):
        value = mapping.get(section)
        entries: dict[str, Any] = value if isinstance(value, dict) else {}
        for name, entry in entries.items():
            if isinstance(entry, dict) and required not in entry and not (section == "roles" and "engine" in entry):
                others = [each for each in entries if each != name]
                fix = did_you_mean(name, others) or f"{section}.{name}.{required}=..., for a new {kind}"
                raise RecipeError(f"{section}.{name}", f"the recipe has no {kind} '{name}'", known=others, fix=fix)


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
    for name, model in recipe.models.items():
        sources = [key for key in ("path", "recipe", "random_weights") if getattr(model, key)]
        if len(sources) != 1:
            raise RecipeError(
                f"models.{name}",
                f"expected exactly one source of weights, got {' and '.join(sources) or 'none'}",
                known=("path", "recipe", "random_weights"),
                fix="keep one, and set the others to null",
            )
        if model.random_weights and (model.architecture is None or model.characters is None):
            raise RecipeError(
                f"models.{name}.random_weights",
                "also needs 'architecture' and 'characters'",
                fix="add both, or start from a path",
            )
        if model.architecture is not None:
            check(model.architecture, f"models.{name}.architecture")
        num_tokens, architecture = len(set(model.characters or "")) + 1, model.architecture
        if model.random_weights and architecture and num_tokens > architecture.vocab_size:
            raise RecipeError(
                f"models.{name}.architecture.vocab_size",
                f"{architecture.vocab_size} is too small for {num_tokens - 1} characters and the end token",
                fix=f"vocab_size {num_tokens}",
            )
    return recipe


def _check_names(recipe: Recipe) -> None:
    """Raise RecipeError for a name that is not safe as the name of a file or folder."""
    names = [("name", recipe.name)]
    sections = {"models": recipe.models, "roles": recipe.roles, "graph": recipe.graph}
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
