"""Check the front door: ``python -m benchmarks.fuzz_recipes [--quick] [--seed 0] [--json FILE]``.

The cases of ``mutations.txt`` are written by hand; 5,000 more recipes are drawn from a seed, and 200 with ``--quick``.
Each must be refused before anything starts, with its path and a fix, or be planned. A drawn recipe that is planned is
judged by the rules in ``recipe_rules.py``, which share nothing with rlflow's own checks.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rlflow
from benchmarks.hostile_recipes import BOMBS, cases, cost_of_bomb, effect
from benchmarks.recipe_fuzzer import draws
from benchmarks.recipe_rules import broken_rules
from benchmarks.reporting import Goal, finish
from rlflow.errors import UserError

TABLE = Path(__file__).with_name("mutations.txt")
# Limits of what a bomb costs until it is refused.
MOST_SECONDS, MOST_MIB = 0.1, 50
_HEAD = "# @package _global_\ndefaults: [grpo_tiny, _self_]\n"
_FILE = "FILE"


@dataclass(frozen=True)
class Mutation:
    """A recipe with one mistake, or with none."""

    rule: str
    recipe: str
    change: str
    """Overrides, or the text of a file where the recipe is ``yaml``."""
    path: str
    """The path of the error that is expected, or ``valid``."""


@dataclass(frozen=True)
class Answer:
    """The answer of rlflow to a recipe."""

    path: str
    """The path of its error, or ``valid``."""
    message: str = ""
    has_fix: bool = True
    is_traceback: bool = False


def read_mutations() -> list[Mutation]:
    """Return the cases of the table."""
    found, rule = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("== "):
            rule = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            recipe, change, path = line.split(" | ")
            found.append(Mutation(rule, recipe, change, path))
    return found


def ask(overrides: Sequence[str]) -> Answer:
    """Load and compile a recipe as a dry run does."""
    try:
        rlflow.compile(rlflow.load(overrides), "local")
    except UserError as error:
        return Answer(error.path, str(error), has_fix=bool(error.notes["Fix"]))
    except Exception as error:
        return Answer("traceback", repr(error), is_traceback=True)
    return Answer("valid")


def ask_about_file(text: str, folder: Path) -> Answer:
    """Ask about the recipe in a file, whose name is ``FILE`` in the answer."""
    file = folder / "mine.yaml"
    file.write_text(text)
    answer = ask([f"recipe={file}"])
    return replace(answer, path=answer.path.replace(str(file), _FILE))


def ask_about(case: Mutation, folder: Path) -> Answer:
    """Ask about a case of the table."""
    if case.recipe != "yaml":
        return ask([f"recipe={case.recipe}", *case.change.split(" ; ")])
    return ask_about_file(_HEAD + case.change.replace("\\n", "\n").replace("\\t", "\t") + "\n", folder)


def objections(answer: Answer) -> Iterator[str]:
    """Yield what is wrong with an answer, whatever the recipe."""
    if answer.is_traceback:
        yield "traceback"
    elif not answer.path or not answer.has_fix:
        yield "no path or no fix"
    elif not answer.message.isprintable() and not answer.message.replace("\n", "").isprintable():
        yield "a message with control characters"


def main() -> int:
    """Print what went wrong and the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table, drawn = read_mutations(), list(draws(arguments.seed, 200 if arguments.quick else 5000))
    counts = {"mutations": len(table) + len(drawn), "tracebacks": 0, "nonsense_accepted": 0, "unhelpful": 0, "valid": 0}

    def count(name: str, what: object, answer: Answer) -> None:
        counts[name] += 1
        if name != "valid":
            print(f"{name}: {str(what)[:300]!r} -> {answer.path}: {answer.message[:300]!r}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in table:
            answer = ask_about(case, folder)
            if answer.path != case.path:
                is_accepted = answer.path == "valid"
                count("nonsense_accepted" if is_accepted else "unhelpful", case, answer)
            _count_objections(answer, case, count)
        for each in drawn:
            answer = ask_about_file(each.text, folder)
            _count_objections(answer, each.recipe, count)
            if answer.path == "valid":
                count("valid", each, answer)
                if rules := ["the file"] if each.must_fail else broken_rules(each.recipe):
                    count("nonsense_accepted", rules, answer)
    counts["hostile"], counts["hostile_effective"] = 0, 0
    for label, taken in _effects():
        counts["hostile"] += 1
        counts["hostile_effective"] += bool(taken)
        if taken:
            print(f"hostile: {label}: {taken}")
    zero = ("tracebacks", "nonsense_accepted", "unhelpful", "hostile_effective")
    goals = {name: Goal("0", counts[name] == 0) for name in zero}
    goals |= {"mutations": Goal("at least 300", counts["mutations"] >= 300), "valid": Goal("any", True)}
    goals["hostile"] = Goal("at least 100", counts["hostile"] >= 100)
    return finish("fuzz_recipes", counts, goals, arguments.json)


def _effects() -> Iterator[tuple[str, str]]:
    """Yield each hostile configuration with how it took effect; an empty text if it did not."""
    for label, (files, words) in cases().items():
        with tempfile.TemporaryDirectory() as name:
            yield label, effect(files, words, Path(name))
    with tempfile.TemporaryDirectory() as name:
        for label, text in BOMBS.items():
            message, seconds, mib = cost_of_bomb(text, Path(name))
            is_cheap = message and seconds < MOST_SECONDS and mib < MOST_MIB
            yield f"bomb: {label}", "" if is_cheap else f"{seconds:.2f} s, {mib:.0f} MiB {message}"


def _count_objections(answer: Answer, what: object, count: "Callable[[str, object, Answer], None]") -> None:
    for objection in objections(answer):
        count("tracebacks" if objection == "traceback" else "unhelpful", what, answer)


if __name__ == "__main__":
    raise SystemExit(main())
