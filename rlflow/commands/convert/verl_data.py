"""The data and the evaluation of a recipe for a script of verl."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import ROLLOUT, Arguments, from_home

_OVERLONG = {"error": "error", "left": "truncate_left"}
_TYPES = (".parquet", ".json", ".jsonl", ".csv", "")
# The column with verl's answers, which the built-in rewards compare with.
_ANSWER = {"answer": "reward_model.ground_truth"}


def data_of(arguments: Arguments, *, compares_answers: bool, reads_images: bool) -> dict[str, Any]:
    """Return the sections ``data`` and ``evaluation``, for a policy that ``reads_images`` or text alone."""
    get = arguments.get
    if not get("data.train_files"):
        arguments.note("data.source", "data.train_files is missing; write the path")
    files = _files(get("data.train_files") or "train.parquet")
    if files[1:]:
        remark = f"only {files[0]} is in the recipe; a folder with the files {{split}}-*.parquet has all"
        arguments.note(f"data.train_files={files}", remark)
    columns = dict(_ANSWER) if compares_answers else {}
    if (prompt := get("data.prompt_key")) != "prompt":
        columns["prompt"] = prompt
    if reads_images and (images := get("data.image_key")) != "images":
        columns["images"] = images
    evaluated, every = _files(get("data.val_files")), get("trainer.test_freq") or -1
    train, evaluation = Path(files[0]), dict[str, Any]()
    data: dict[str, Any] = {"source": files[0]}
    if train.name == "train.parquet" and evaluated == [str(train.with_name("test.parquet"))]:
        # A folder with a file for each split.
        data = {"source": str(train.parent), "eval_split": "test"}
    elif every > 0 and evaluated:
        evaluation["sets"] = _sets(evaluated, columns)
    elif every > 0:
        arguments.note(f"trainer.test_freq={every}", "nothing is evaluated: data.val_files is missing")
    elif evaluated:
        arguments.note(f"data.val_files={evaluated}", "nothing is evaluated: trainer.test_freq is not set")
    if other := [file for file in (files[0], *evaluated) if Path(file).suffix not in _TYPES]:
        arguments.note(", ".join(other), f"rlflow reads {', '.join(_TYPES[:-1])} and folders of them: convert the file")
    if any("$" in file for file in (files[0], *evaluated)):
        arguments.note("data.source", "has a variable of the shell; write the path")
    data |= {"columns": columns} if columns else {}
    if template := _template_options(arguments):
        data["template_options"] = template
    data |= {"batch_size": get("data.train_batch_size"), "max_prompt_tokens": get("data.max_prompt_length")}
    if get("data.filter_overlong_prompts"):
        data["overlong"] = "drop"
        arguments.used.add("data.truncation")
    elif reads_images and (truncation := get("data.truncation")) != "error":
        remark = "prompts with images are never cut: long ones are dropped"
        arguments.note(f"data.truncation={truncation}", remark)
        data["overlong"] = "drop"
    elif (truncation := get("data.truncation")) != "error":
        if truncation not in _OVERLONG:
            arguments.note(f"data.truncation={truncation}", "not supported; prompts lose their beginning")
        data["overlong"] = "truncate_left"
    if every <= 0 or not evaluated:
        return {"data": data}
    return {"data": data, "evaluation": {"every": every, "num_prompts": 512, **_sampling(arguments), **evaluation}}


def _template_options(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of the chat template."""
    beginning = "data.apply_chat_template_kwargs"
    options = dict(arguments.get(beginning) or {})
    keys = [key for key in arguments.values if key.startswith(f"{beginning}.")]
    return options | {key.removeprefix(f"{beginning}."): arguments.get(key) for key in keys}


def _sampling(arguments: Arguments) -> dict[str, Any]:
    """Return how responses of the evaluation are sampled, where it has several."""
    get = arguments.get
    arguments.note("evaluation.num_prompts", "rlflow evaluates the first 512 rows; check the number")
    number = get(f"{ROLLOUT}.val_kwargs.n")
    options = {name: get(f"{ROLLOUT}.val_kwargs.{name}") for name in ("temperature", "top_p")}
    if number == 1:
        arguments.used -= {f"{ROLLOUT}.val_kwargs.{name}" for name in options}
        return {}
    if not options["temperature"]:
        remark = "verl validates at a temperature of 0, where all responses are the same: one is generated"
        arguments.note(f"{ROLLOUT}.val_kwargs.n={number}", remark)
        return {}
    return {"num_responses": number, **{name: value for name, value in options.items() if value}}


def _sets(files: list[str], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return an evaluation set for each file, named after it, and after its folder where that is not enough."""
    sets = dict[str, Any]()
    for file in files:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(file).stem).strip("_") or "validation"
        if name in sets:
            name = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{Path(file).parent.name}_{name}_{len(sets)}").strip("_")
        sets[name] = {"source": file, "split": "train", **({"columns": dict(columns)} if columns else {})}
    return sets


def _files(files: Any) -> list[str]:
    if not files:
        return []
    if isinstance(files, str) and re.fullmatch(r"\[.*\]", files):
        # A list in quotes that the shell passes on.
        files = [file.strip(" '\"") for file in files[1:-1].split(",")]
    return [from_home(str(file)) for file in (files if isinstance(files, list) else [files])]
