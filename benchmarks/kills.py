"""Kill runs at random moments and inside saves, damage their checkpoints, fill their disk, and resume them.

``python -m benchmarks.kills [--quick] [--kills N] [--json FILE]``

The runs are of a tiny model, with evaluations and unfinished rollouts in their checkpoints. A resumed run must end as
an undisturbed one: the same weights, optimizer state, metrics and samples, bit for bit, times left out. A kill is
SIGKILL, at a random moment, before a random file operation of a save, or up to 30 ms after one. Every run is forked
from one process that has imported everything. Takes about twenty minutes on two cores, and a minute with ``--quick``.
"""

import argparse
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

import rlflow
from benchmarks.faulty_process import FINISHED, TYPED, Fault, run_with
from benchmarks.reporting import Goal, finish
from rlflow.calibrate.probes import Probe, recipe_of, write_recipe
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.report.records import MetricsWriter, SampleLog
from rlflow.runtime.checkpoint import checkpoint_step, checkpoints, last
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

_STEPS, _EVERY = 6, 2
_KILLS, _KILLS_PER_RUN = 500, 2
_QUICK = 20
_LANES = 2
_GOALS = ("unloadable", "mixed", "state_differs", "metrics_differ", "leftovers", "undetected", "unfinished")


@dataclass(frozen=True)
class Undisturbed:
    """A run without a fault, which keeps all its checkpoints."""

    folder: Path
    seconds: float
    operations: list[int]
    """The numbers of the file operations on checkpoints and models."""
    names: frozenset[str]
    """The files and folders of such a run that keeps two checkpoints."""


@cache
def plan_of(folder: Path, **checkpoint_options: int) -> Plan:
    probe = Probe(name="kills", hidden_size=32, num_layers=2, batch_size=3, group_size=4, max_tokens=6)
    recipe = recipe_of(probe)
    recipe["roles"]["actor"]["optimizer"] = {"learning_rate": 1e-2, "schedule": "linear"}
    recipe["graph"]["rollouts"]["overcommit"] = 0.67
    # Responses of a random model differ in it, so that every step changes the weights.
    recipe["graph"]["rewards"]["function"] = "benchmarks.instant_engine:text_length"
    recipe |= {"steps": _STEPS, "evaluation": {"every": 2, "num_prompts": 10}}
    recipe["checkpoints"] = {"every": _EVERY, **checkpoint_options}
    return rlflow.compile(rlflow.load([f"recipe={write_recipe(recipe, folder)}"]), None)


def disturbed(plan: Plan, folder: Path, fault: Fault, log: Path | None = None) -> int | None:
    """Start the run in ``folder``, or resume it from its last checkpoint, in a process with a fault."""

    def train() -> None:
        run(plan, folder, LocalRuntime(), [MetricsWriter(), SampleLog()], resume=bool(checkpoints(folder)))

    return run_with(fault, train, folder, log)


def undisturbed(folder: Path) -> Undisturbed:
    """Make two such runs, and check that they are the same."""
    every, usual = folder / "every", folder / "usual"
    start = perf_counter()
    codes = [disturbed(plan_of(folder), usual, Fault(), folder / "operations")]
    seconds = perf_counter() - start
    codes.append(disturbed(plan_of(folder, keep=_STEPS), every, Fault()))
    assert codes == [FINISHED, FINISHED], "an undisturbed run failed"
    expected = Undisturbed(every, seconds, json.loads((folder / "operations").read_text()), names(usual))
    assert not differences(usual, expected), "two undisturbed runs differ"
    kinds = [(each / "actor" / f"{kind}.safetensors") for kind in ("weights", "exp_avg") for each in checkpoints(every)]
    assert len({file.read_bytes() for file in kinds}) == len(kinds), "steps do not change the model"
    return expected


def names(folder: Path) -> frozenset[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return frozenset(name for name in found if not name.startswith("tensorboard/"))


def content(file: Path) -> Any:
    """Return what a file of a checkpoint holds: the archives of numpy also have the time at which they were written."""
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}
    if file.name == "manifest.json":
        manifest = json.loads(file.read_text())
        return {name: manifest[name] for name in ("step", "rows", "evaluations")} | {"files": set(manifest["files"])}
    return file.read_bytes()


def contents(folder: Path) -> dict[str, Any]:
    return {str(file.relative_to(folder)): content(file) for file in folder.rglob("*") if file.is_file()}


def lines(file: Path) -> list[Mapping[str, Any]]:
    """Return the lines without times."""
    parsed = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    return [{name: value for name, value in line.items() if "second" not in name} for line in parsed]


def differences(folder: Path, expected: Undisturbed) -> list[str]:
    """Return the figures in which a run that has ended differs from the undisturbed one."""
    final, model = f"checkpoints/step-{_STEPS:06d}", "model/actor"
    if left := names(folder) - expected.names:
        print(f"{folder.name} leaves {', '.join(sorted(left))}", flush=True)
    is_same = {
        "state_differs": all(contents(folder / x) == contents(expected.folder / x) for x in (final, model)),
        "metrics_differ": all(
            lines(folder / x) == lines(expected.folder / x) for x in ("metrics.jsonl", "samples.jsonl")
        ),
        "leftovers": not left,
    }
    return [figure for figure, same in is_same.items() if not same]


def check_checkpoints(folder: Path, expected: Undisturbed) -> Counter[str]:
    """Return how many checkpoints cannot be loaded, and how many are not those of an undisturbed run."""
    found: Counter[str] = Counter()
    experiment = experiment_of(plan_of(expected.folder.parent).recipe)
    for each in checkpoints(folder):
        alone = folder.with_name(f"{folder.name}-alone")
        shutil.copytree(each, alone / "checkpoints" / each.name)
        try:
            last(alone, experiment)
            same = expected.folder / "checkpoints" / each.name
            found["mixed"] += contents(each) != contents(same)
        except RecipeError:
            found["unloadable"] += 1
        shutil.rmtree(alone)
    return found


def resumed(plan: Plan, folder: Path, expected: Undisturbed) -> Counter[str]:
    """Resume a run, let it end, and compare it."""
    if disturbed(plan, folder, Fault()) != FINISHED:
        return Counter(["unfinished"])
    return Counter(differences(folder, expected))


def killed_run(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Kill a run, and the run that resumes it, and compare the one that resumes that."""
    draw, plan = random.Random(seed), plan_of(expected.folder.parent)
    found: Counter[str] = Counter()
    for _ in range(_KILLS_PER_RUN):
        in_save = Fault("operation", draw.choice(expected.operations), draw.choice([None, draw.uniform(0, 0.03)]))
        fault = draw.choice([Fault("moment", draw.uniform(0, expected.seconds)), in_save, in_save])
        code = disturbed(plan, folder, fault)
        if code is not None:
            found["unfinished"] += code != FINISHED
            break
        found["kills"] += 1
        found["kills_in_saves"] += fault is in_save
        found += check_checkpoints(folder, expected)
    return found + resumed(plan, folder, expected)


def run_without_space(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Fill the disk, or limit the size of files, from a random operation on; then resume the run."""
    draw, plan = random.Random(seed), plan_of(expected.folder.parent)
    # From the first checkpoint on: files before it are written by libraries that are no part of this.
    full = Fault("full disk", draw.choice(expected.operations))
    large = max(file.stat().st_size for file in expected.folder.rglob("*.safetensors"))
    code = disturbed(plan, folder, draw.choice([full, Fault("file size", draw.randrange(large // 2, large))]))
    found = check_checkpoints(folder, expected)
    found["full_disks"] += code == TYPED
    found["unfinished"] += code not in (TYPED, FINISHED)
    return found + resumed(plan, folder, expected)


def damages(draw: random.Random) -> Iterator[Callable[[Path], None]]:
    """Yield ways to damage the newest of two checkpoints in a folder."""

    def a_file(newest: Path) -> Path:
        return draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))

    def flip(newest: Path) -> None:
        file = a_file(newest)
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)

    def cut(newest: Path) -> None:
        file = a_file(newest)
        os.truncate(file, draw.randrange(file.stat().st_size))

    def remove(newest: Path) -> None:
        a_file(newest).unlink()

    def mix(newest: Path) -> None:
        """Put files of the checkpoint before into this one."""
        before = newest.with_name(f"step-{checkpoint_step(newest) - _EVERY:06d}")
        file = newest / draw.choice(["manifest.json", "actor/weights.safetensors", "actor/exp_avg.safetensors"])
        shutil.copy(before / file.relative_to(newest), file)

    def lie(newest: Path) -> None:
        """Leave pointers to checkpoints that do not exist, and the name of a newer one without files."""
        (newest.parent / "latest").write_text("step-000099")
        (newest.parent / "last").symlink_to("step-000002")
        shutil.rmtree(newest)
        newest.mkdir()

    yield from (flip, cut, remove, mix, lie)


def damaged_run(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Damage the newest checkpoint of a run, and resume it from the one before."""
    plan, found = plan_of(expected.folder.parent), Counter(["damages"])
    source = expected.folder.with_name("usual")
    shutil.copytree(source, folder, symlinks=True)
    ways = list(damages(random.Random(seed)))
    newest = checkpoints(folder)[-1]
    ways[seed % len(ways)](newest)
    used = last(folder, experiment_of(plan.recipe))
    found["undetected"] += used is None or len(used.damaged) != 1 or used.progress.step != _STEPS - _EVERY
    for name in (f"damaged-{newest.name}", "latest", "last"):  # kept for people to look at
        path = newest.with_name(name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return found + resumed(plan, folder, expected)


def disturb(folder: Path, kills: int) -> Counter[str]:
    """Kill runs until there are so many kills, and a quarter as many of each other fault."""
    expected = undisturbed(folder)
    found: Counter[str] = Counter()
    with ProcessPoolExecutor(_LANES, get_context("fork")) as lanes:
        seeds = count()
        while found["kills"] < kills:
            batch = min(_LANES * 10, -(-(kills - found["kills"]) // _KILLS_PER_RUN))
            runs = [lanes.submit(killed_run, folder / f"run-{seed}", expected, seed) for seed in islice(seeds, batch)]
            for done in as_completed(runs):
                found += done.result()
            print(f"{found['kills']} kills: {dict(found)}", flush=True)
        others = [
            lanes.submit(work, folder / f"{work.__name__}-{seed}", expected, seed)
            for work in (damaged_run, run_without_space)
            for seed in range(-(-kills // 4))
        ]
        for done in as_completed(others):
            found += done.result()
    return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.kills")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} kills")
    parser.add_argument("--kills", type=int, default=_KILLS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Everything that a run imports, so that forked processes share it. Threads do not survive a fork.
    import accelerate.utils.other  # type: ignore[import-untyped]  # noqa: F401
    import torch
    import torch.utils.tensorboard
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="rlflow-kills-") as temporary:
        found = disturb(Path(temporary), _QUICK if options.quick else options.kills)
    counted = ("kills", "kills_in_saves", "full_disks", "damages")
    figures: dict[str, float | bool] = {name: found[name] for name in (*counted, *_GOALS)}
    goals = {name: Goal("at least 1", found[name] > 0) for name in counted}
    goals |= {name: Goal("exactly 0", found[name] == 0) for name in _GOALS}
    return finish("kills", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
