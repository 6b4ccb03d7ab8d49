"""Model cards: the README.md of each exported model, with its base model, its training, its scores and its plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow._version import __version__
from rlflow.compiler.models import trained_model
from rlflow.compiler.plan import Plan
from rlflow.data.files import is_local
from rlflow.engines.base import Head, choose_head
from rlflow.recipe import Model, Optimizer
from rlflow.recipe.evaluation import PREFIX
from rlflow.report.formula import loss_lines
from rlflow.report.hub import pushed_role
from rlflow.report.plan_text import describe_layout
from rlflow.report.records import METRICS, is_evaluation, read_lines
from rlflow.runtime.protocols import Observer, Report
from rlflow.system.text_files import replace_text

CARD = "README.md"
"""The name of a card in the model's folder, where the hub and people look for it."""
_CLASSES: Mapping[Head, str] = {
    "vocabulary": "AutoModelForCausalLM",
    "value": "AutoModelForTokenClassification",
    "reward": "AutoModelForSequenceClassification",
}
_TASKS: Mapping[Head, str] = {"vocabulary": "text-generation", "reward": "text-classification"}
"""The hub's names of tasks. It has none for value models."""
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


class ModelCards(Observer):
    """A writer of a card for each exported model."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._plan, self._directory = plan, directory

    def ended(self, report: Report) -> None:
        evaluations = [line for line in read_lines(self._directory / METRICS) if is_evaluation(line)]
        for role, folder in report.models.items():
            replace_text(Path(folder) / CARD, model_card(self._plan, report, role, evaluations))


def model_card(plan: Plan, report: Report, role: str, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the card of a role's model; ``evaluations`` are the lines of all evaluations in the metrics of the run.

    A card is public. It names models and data sets of the hub, but no files, hosts or options of functions.
    """
    from huggingface_hub import ModelCardData

    recipe, head = plan.recipe, choose_head(plan.graph.capabilities(role))
    base, earlier = _base_model(recipe.models[recipe.roles[role].model])
    data = _hub_name(recipe.data.source)
    metadata = ModelCardData(
        base_model=_hub_name(base.path or ""),
        datasets=[data] if data else None,
        library_name="transformers",
        pipeline_tag=_TASKS.get(head),
        tags=["rlflow"],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {recipe.name}",
        f"The model of the role `{role}` after {report.steps} steps of the recipe `{recipe.name}`, trained with rlflow "
        f"{__version__}.",
        *_loading(plan, role, head),
        *_scores(evaluations),
        "## Training",
        _table(("", ""), _training(plan, role, base, earlier)),
        *_loss(plan),
        *_plan(plan, report),
    ]
    return "\n\n".join(parts) + "\n"


def _base_model(model: Model) -> tuple[Model, list[str]]:
    """Return the model that training started from, and the recipes that have trained it since, in their order."""
    recipes: list[str] = []
    while model.recipe is not None:
        recipes.insert(0, model.recipe.name)
        model = trained_model(model.recipe)
    return model, recipes


def _hub_name(source: str) -> str | None:
    """Return the source if it is the name of a model or a data set on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return None if is_local(source) else source


def _loading(plan: Plan, role: str, head: Head) -> Iterator[str]:
    """Yield the code that loads the model."""
    name, where = ".", "  # this folder, or the model's name on the hub"
    if role == pushed_role(plan):
        name, where = str(plan.recipe.push_to_hub), ""
    yield "## Use"
    yield f"""```python
from transformers import {_CLASSES[head]}, AutoTokenizer

name = "{name}"{where}
model = {_CLASSES[head]}.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
```"""
    if plan.recipe.roles[role].lora is not None:
        yield (
            "The trained adapters are merged into these weights. The folder `adapters` has them alone: "
            '`peft.PeftModel.from_pretrained(base_model, name, subfolder="adapters")`.'
        )


def _scores(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the metrics of the first and the last evaluation."""
    if not evaluations:
        return
    shown = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else [evaluations[0]]
    names = [name for name in shown[-1] if name.startswith(PREFIX)]
    rows = [(f"`{name.removeprefix(PREFIX)}`", *(_number(line.get(name)) for line in shown)) for name in names]
    yield "## Scores"
    yield "On held-out rows:"
    yield _table(("", *(f"after {line['step']} steps" for line in shown)), rows)


def _training(plan: Plan, role: str, base: Model, earlier: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the model learned from, and how."""
    recipe, options = plan.recipe, plan.recipe.roles[role]
    yield "base model", _describe_model(base)
    if earlier:
        yield "trained before by", ", ".join(f"the recipe `{name}`" for name in earlier)
    yield "data", _describe_data(recipe.data.source)
    yield "rows in a step", str(recipe.data.batch_size)
    for node in plan.graph.nodes:
        if (made := node.operation.sampling) is not None:
            yield (
                f"`{node.name}`",
                f"{made.group_size} per prompt, up to {made.max_tokens} tokens each, temperature {made.temperature:g}",
            )
    yield "nodes of a step", ", ".join(f"`{node.name}` ({_code(node.operation.kind)})" for node in plan.graph.nodes)
    optimizer = options.optimizer or Optimizer()
    warmup = f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    yield "learning rate", f"{optimizer.learning_rate:g}, {optimizer.schedule}{warmup} ({_OPTIMIZERS[optimizer.kind]})"
    if options.lora is not None:
        yield "adapters", f"LoRA, rank {options.lora.rank}, alpha {options.lora.alpha:g}"
    yield "seed", str(recipe.seed)
    yield "fingerprint", f"`{plan.fingerprint}`"


def _loss(plan: Plan) -> Iterator[str]:
    """Yield the losses of the trained roles, with their numbers; none of nodes that state no formula."""
    if lines := loss_lines(plan.graph):
        yield "The loss:"
        yield "\n".join(f"    {line}" for line in lines)


def _describe_model(model: Model) -> str:
    figures = model.architecture
    size = f"{figures.num_parameters:,} parameters ({_code(figures.model_type)})" if figures else ""
    if model.random_weights:
        return f"random weights, {size}"
    if (name := _hub_name(model.path or "")) is not None:
        return _code(name)
    return f"a local model, {size}" if size else "a local model"


def _describe_data(source: str) -> str:
    if ":" in source and not is_local(source) and "/" not in source:
        return f"the function {_code(source)}"
    return "local files" if (name := _hub_name(source)) is None else _code(name)


def _plan(plan: Plan, report: Report) -> Iterator[str]:
    """Yield where every role ran, and the predicted and measured figures."""
    unit = "CPUs" if plan.prediction.headroom_gib is None else "GPUs"
    yield "## Plan"
    yield f"Planned for {_code(plan.cluster.shape)}; {unit} in use: {plan.prediction.num_gpus}."
    roles = [
        (f"`{name}`", _code(plan.recipe.roles[name].engine), describe_layout(placed.layout))
        for name, placed in plan.roles.items()
    ]
    yield _table(("role", "engine", "layout"), roles)
    figures = {"seconds of a step": report.step}
    measured = [pair for phases in report.memory.values() for pair in phases.values() if pair["measured"]]
    if measured:
        figures["GiB of the fullest process"] = max(measured, key=lambda pair: pair["measured"] or 0.0)
    rows = [(name, _number(pair.get("predicted")), _number(pair.get("measured"))) for name, pair in figures.items()]
    yield _table(("", "predicted", "measured"), rows)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
    """Return a text as code in a table, where no character of it has a meaning."""
    plain = " ".join(text.split()).replace("`", "'").replace("|", r"\|")
    return f"`{plain}`"
