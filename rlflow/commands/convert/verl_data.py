"""The data of a recipe for a script of verl."""

from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import OVERLONG, Arguments


def data_of(arguments: Arguments) -> dict[str, Any]:
    """Return the section ``data``."""
    get = arguments.get
    train = _file(get("data.train_files") or "train.parquet", "data.train_files", arguments)
    evaluated = _file(get("data.val_files") or "", "data.val_files", arguments)
    data: dict[str, Any] = {"source": train}
    if Path(train).name == "train.parquet" and evaluated == str(Path(train).with_name("test.parquet")):
        # A folder with a file for each split.
        data = {"source": str(Path(train).parent), "eval_split": "test"}
    elif evaluated:
        arguments.note(
            f"data.val_files={evaluated}", "put both files into one folder, as train.parquet and test.parquet"
        )
    if "$" in data["source"]:
        arguments.note("data.source", "has a variable of the shell; write the path")
    if (column := get("data.prompt_key")) != "prompt":
        data["columns"] = {"prompt": column}
    arguments.note("the column answer", "verl's rows have it in reward_model.ground_truth; give it a column of its own")
    data |= {"batch_size": get("data.train_batch_size"), "max_prompt_tokens": get("data.max_prompt_length")}
    if get("data.filter_overlong_prompts"):
        data["overlong"] = "drop"
        get("data.truncation")
    elif (truncation := get("data.truncation")) != "error":
        if truncation not in OVERLONG:
            arguments.note(f"data.truncation={truncation}", "not supported; prompts lose their beginning")
        data["overlong"] = "truncate_left"
    return data


def _file(files: Any, key: str, arguments: Arguments) -> str:
    """Return the path of a file, the first of several."""
    files = files if isinstance(files, list) else [files]
    if len(files) > 1:
        arguments.note(
            f"{key}={files}", f"only {files[0]} is in the recipe; a folder with the files {{split}}-*.parquet has all"
        )
    return str(files[0]) if files else ""
