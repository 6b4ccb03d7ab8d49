"""Converts a training script of verl to a recipe: ``rlflow convert SCRIPT [--output FILE]``.

It reads the ``key=value`` arguments of ``verl.trainer.main_ppo``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import rlflow
from rlflow.commands.convert.verl import convert
from rlflow.compiler.checks import check
from rlflow.compiler.wire import wire
from rlflow.errors import FileError, GraphError, RecipeError


def main(arguments: Sequence[str]) -> int:
    """Write the recipe and print the remarks; return the exit code."""
    parser = argparse.ArgumentParser("rlflow convert", description="Convert a script of verl to a recipe.")
    parser.add_argument("script", type=Path, help="a file with the arguments of verl.trainer.main_ppo")
    parser.add_argument("--output", type=Path, help="the file of the recipe, by default the script's name with .yaml")
    options = parser.parse_args(arguments)
    output = options.output or options.script.with_suffix(".yaml")
    try:
        converted = convert(options.script.read_text("utf-8"))
        if options.output is None and output.exists():
            raise FileError(str(output), "exists already", fix="--output FILE, which may replace it")
        _check(converted.recipe)
        output.write_text(converted.recipe)
    except UnicodeDecodeError:
        raise FileError(str(options.script), "is not UTF-8") from None
    except OSError as error:
        raise FileError(str(error.filename), str(error.strerror)) from None
    remarks = "".join(f"{what}: {why}\n" for what, why in converted.remarks.items())
    print(f"{remarks}\nplan it: rlflow recipe={output} cluster={converted.cluster} dry_run=true")
    return 0


def _check(text: str) -> None:
    """Raise RecipeError for a recipe that rlflow refuses, so that none is written."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "converted.yaml"
        file.write_text(text)
        try:
            recipe = rlflow.load([f"recipe={file}"])
            check(recipe, wire(recipe))
        except (RecipeError, GraphError) as error:
            # A function of the script's own may need a PYTHONPATH that it does not have yet.
            if not error.path.startswith("graph.rewards.functions"):
                fact, fix = f"in the recipe of this script: {error.fact}", error.notes["Fix"]
                raise RecipeError(error.path, fact, fix=fix) from None
