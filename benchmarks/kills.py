"""Kill runs at random moments and inside saves, damage their checkpoints, fill their disk, and resume them.

``python -m benchmarks.kills [--quick] [--kills N] [--json FILE]``

The runs are of a tiny model, with evaluations. Some generate a step in several batches, some generate ahead of
training, some have unfinished rollouts in their checkpoints, and some have agents. A resumed run must end as an
undisturbed one: the same weights, optimizer state, metrics and samples, bit for bit, times left out. It must not
generate a response of the journal again, nor an agent's call; those that a kill interrupted are counted. A kill is
SIGKILL, at a random moment, before a random file operation of a save or of the journal, or up to 30 ms after one. Every
run is forked from one process that has imported everything. Runs with agents start two more processes, which takes most
of their time. ``--quick`` has all kinds of runs and faults in 12 kills, which take four minutes on two busy cores; 500
kills take hours.
"""

import argparse
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
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
from benchmarks.damages import damages
from benchmarks.faulty_process import FINISHED, TYPED, Fault, run_with
from benchmarks.noted_responses import count_responses, note_responses, responses_log
from benchmarks.reporting import Goal, finish
from rlflow.commands.calibrate.probes import Probe, recipe_of, write_recipe
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.report.records import MetricsWriter, SampleLog
from rlflow.runtime.checkpoint import checkpoint_step, checkpoints, last
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Observer
from rlflow.runtime.run import run

_STEPS, _EVERY = 6, 2
_KILLS, _KILLS_PER_RUN = 500, 2
_QUICK = 12
_LANES = 2
_PROBLEMS = (
    "unloadable",
    "mixed",
    "state_differs",
    "metrics_differ",
    "leftovers",
    "undetected",
    "unfinished",
    "generated_again",
)
# The kinds of runs, one after another. Runs with agents take five times as long.
_KINDS = ("batches", "ahead", "batches", "ahead", "agents")


@dataclass(frozen=True)
class Undisturbed:
    """A run without a fault, which keeps all its checkpoints."""

    kind: str
    folder: Path
    seconds: float
    operations: list[int]
    """The numbers of the file operations on checkpoints, models and the journal."""
    names: frozenset[str]
    """The files and folders of such a run that keeps two checkpoints."""

    @property
    def plan(self) -> Plan:
        return plan_of(self.folder.parent, self.kind)


class StopAfter(Observer):
    """Stops a run after some steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self.is_reached = steps, False

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.is_reached = step == self._steps


@cache
def plan_of(folder: Path, kind: str, **checkpoint_options: int) -> Plan:
    probe = Probe(name="kills", hidden_size=32, num_layers=2, batch_size=3, group_size=4, max_tokens=6)
    recipe = recipe_of(probe)
    recipe["roles"]["actor"]["optimizer"] = {"learning_rate": 1e-2, "schedule": "linear"}
    # A prompt and its responses are a batch of their own.
    recipe["roles"]["rollout"]["micro_batch_tokens"] = 16
    if kind == "ahead":
        recipe["overlap"] = {"max_staleness": 1}
    # Responses of a random model differ in it, so that every step changes the weights.
    recipe["graph"]["rewards"]["function"] = "benchmarks.text_rewards:text_length"
    if kind == "agents":
        recipe["models"]["policy"] |= {"characters": None, "tokenizer": "bytes"}
        recipe["models"]["policy"]["architecture"] |= {"vocab_size": 265, "max_position_embeddings": 256}
        agent = {"node": "agent", "environment": "benchmarks.text_rewards:call_thrice", "max_calls": 3, "processes": 1}
        recipe["graph"]["rollouts"] |= {**agent, "turn_tokens": 6, "max_tokens": 160}
        recipe["graph"]["rewards"]["function"] = "environment"
        recipe["data"]["max_prompt_tokens"] = 32
    recipe |= {"steps": _STEPS, "evaluation": {"every": 2, "num_prompts": 10}}
    recipe["checkpoints"] = {"every": _EVERY, **checkpoint_options}
    return rlflow.compile(rlflow.load([f"recipe={write_recipe(recipe, folder)}"]), None)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the kinds of runs."""
    yield from (plan_of(folder, kind) for kind in dict.fromkeys(_KINDS))


def disturbed(plan: Plan, folder: Path, fault: Fault, log: Path | None = None, steps: int | None = None) -> int | None:
    """Start the run in ``folder``, or resume it from its last checkpoint, in a process with a fault.

    With ``steps``, the run stops after them.
    """

    def train() -> None:
        note_responses(responses_log(folder))
        stopper = StopAfter(steps or 0)
        observers = [MetricsWriter(), SampleLog(), stopper]
        resume = bool(checkpoints(folder))
        run(plan, folder, LocalRuntime(), observers, resume=resume, stop=lambda: stopper.is_reached)

    code = run_with(fault, train, folder, log)
    if code not in (None, FINISHED, TYPED):
        print(f"{folder.name} ends with code {code} after {fault}", flush=True)
    return code


def undisturbed(folder: Path, kind: str) -> Undisturbed:
    """Make undisturbed runs, and check that they are the same. One stops before its last checkpoint."""
    every, usual, stopped = folder / "every", folder / "usual", folder / "stopped"
    folder.mkdir()
    start = perf_counter()
    codes = [disturbed(plan_of(folder, kind), usual, Fault(), folder / "operations")]
    seconds = perf_counter() - start
    codes.append(disturbed(plan_of(folder, kind, keep=_STEPS), every, Fault()))
    codes.append(disturbed(plan_of(folder, kind), stopped, Fault(), steps=_STEPS - _EVERY))
    assert codes == [FINISHED] * 3, "an undisturbed run failed"
    expected = Undisturbed(kind, every, seconds, json.loads((folder / "operations").read_text()), names(usual))
    assert not differences(usual, expected), "two undisturbed runs differ"
    files = [f"actor/{kind}-00000-00000.safetensors" for kind in ("weights", "exp_avg")]
    kinds = [each / file for file in files for each in checkpoints(every)]
    assert len({file.read_bytes() for file in kinds}) == len(kinds), "steps do not change the model"
    return expected


def names(folder: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))


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
    experiment = experiment_of(expected.plan.recipe)
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
    if (code := disturbed(plan, folder, Fault())) != FINISHED:
        print(f"{folder.name} does not end when it is resumed: code {code}", flush=True)
        return Counter(["unfinished"])
    return Counter(differences(folder, expected))


def killed_run(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Kill a run, and the run that resumes it, and compare the one that resumes that."""
    draw, plan = random.Random(seed), expected.plan
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
    found += resumed(plan, folder, expected)
    return found + count_responses(folder)


def run_without_space(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Fill the disk, or limit the size of files, from a random operation on; then resume the run."""
    draw, plan = random.Random(seed), expected.plan
    # From the first checkpoint on: files before it are written by libraries that are no part of this.
    full = Fault("full disk", draw.choice(expected.operations))
    large = max(file.stat().st_size for file in expected.folder.rglob("*.safetensors"))
    fault = draw.choice([full, Fault("file size", draw.randrange(large // 2, large))])
    code = disturbed(plan, folder, fault)
    if code is None:
        print(f"{folder.name} was killed by somebody else after {fault}", flush=True)
    found = check_checkpoints(folder, expected)
    found["full_disks"] += code == TYPED
    found["unfinished"] += code not in (TYPED, FINISHED)
    return found + resumed(plan, folder, expected)


def damaged_run(folder: Path, expected: Undisturbed, seed: int) -> Counter[str]:
    """Damage the newest checkpoint of a run, and resume it from the one before."""
    plan, found = expected.plan, Counter(["damages"])
    source = expected.folder.with_name("stopped")
    shutil.copytree(source, folder, symlinks=True)
    shutil.copy(responses_log(source), responses_log(folder))
    ways = list(damages(random.Random(seed), _EVERY))
    newest = checkpoints(folder)[-1]
    ways[seed % len(ways)](newest)
    used = last(folder, experiment_of(plan.recipe))
    step = checkpoint_step(newest) - _EVERY
    found["undetected"] += used is None or len(used.damaged) != 1 or used.progress.step != step
    for name in (f"damaged-{newest.name}", "latest", "last"):  # kept for people to look at
        path = newest.with_name(name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    found += resumed(plan, folder, expected)
    return found + count_responses(folder)


def disturb(folder: Path, kills: int) -> Counter[str]:
    """Kill runs until there are so many kills, and a quarter as many of each other fault."""
    expected = {kind: undisturbed(folder / kind, kind) for kind in dict.fromkeys(_KINDS)}
    print({kind: f"{run.seconds:.0f} s" for kind, run in expected.items()}, flush=True)
    kinds = [expected[kind] for kind in _KINDS]
    found: Counter[str] = Counter()
    with ProcessPoolExecutor(_LANES, get_context("fork")) as lanes:
        seeds = count()
        while found["kills"] < kills:
            batch = min(_LANES * 10, -(-(kills - found["kills"]) // _KILLS_PER_RUN))
            runs = [
                lanes.submit(killed_run, folder / f"run-{seed}", kinds[seed % len(kinds)], seed)
                for seed in islice(seeds, batch)
            ]
            for done in as_completed(runs):
                found += done.result()
            print(f"{found['kills']} kills: {dict(found)}", flush=True)
        others = [
            # From the end, so that few faults are in runs with agents too.
            lanes.submit(work, folder / f"{work.__name__}-{seed}", kinds[-1 - seed % len(kinds)], seed)
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
    # Everything that a run imports, so that forked processes share it. Threads do not survive a fork. transformers
    # imports deepspeed when it saves a model.
    import accelerate.utils.other  # type: ignore[import-untyped]  # noqa: F401
    import deepspeed  # noqa: F401
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="rlflow-kills-") as temporary:
        found = disturb(Path(temporary), _QUICK if options.quick else options.kills)
    counted = ("kills", "kills_in_saves", "full_disks", "damages", "responses_found")
    figures: dict[str, float | bool] = {name: found[name] for name in (*counted, "responses_interrupted", *_PROBLEMS)}
    asked_again = found["responses_found"] + found["generated_again"]
    figures["replayed_share"] = found["responses_found"] / max(1, asked_again)
    goals = {name: Goal("at least 1", found[name] > 0) for name in counted}
    goals["responses_interrupted"] = Goal("no goal", True)
    goals["replayed_share"] = Goal("at least 0.9", figures["replayed_share"] >= 0.9)
    goals |= {name: Goal("exactly 0", found[name] == 0) for name in _PROBLEMS}
    return finish("kills", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
