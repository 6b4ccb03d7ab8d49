"""Hydra's door: the command line, its exit codes, and no traceback for a mistake of the user's.

0: done. 1: an engine failed. 2: a mistake in the recipe or on the command line. 130: stopped by Ctrl-C or SIGTERM.

Stopping a run from outside: the first signal ends it after the step, with a checkpoint; the second at once.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from traceback import walk_tb
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

import rlflow
from rlflow.arguments import help_text, hydra_arguments
from rlflow.cluster_detection import default_cluster, detect_cluster
from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import Plan, format_duration, read_plan, write_plan
from rlflow.compiler.ranking import Outcome, ranking
from rlflow.compiler.render import render
from rlflow.compose import (
    COMPOSING_ERRORS,
    CONF,
    FrontDoor,
    calibration_of,
    composing_error,
    front_door_of,
    recipe_of,
    register_sources,
)
from rlflow.earlier_runs import cluster_of_run, find_run, steps_behind
from rlflow.errors import EngineError, PlacementError, RecipeError, UserError, storage_error
from rlflow.recipe import Tune
from rlflow.report.progress import WIDTH, displays, output_console, show, show_error, show_warning
from rlflow.resources.cluster import Cluster, cluster_from

STOPPED = 130
STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


def main() -> int:
    """The exit code of ``python -m rlflow`` with the arguments of this process."""
    # Lets Hydra's errors through to here, where they are put into our form.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Threads that wait for work spin only shortly: two runs on one machine would else starve each other.
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")
    # A console command has the folder of its script there, in place of the one with the user's own modules.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    typed = sys.argv[1:]
    if {"-h", "--help"} & set(typed):
        print(help_text(), end="")
        return 0
    if "--version" in typed:
        print(f"rlflow {rlflow.__version__}")
        return 0
    register_sources()
    try:
        sys.argv[1:] = hydra_arguments(typed, _config_dir())
    except UserError as error:
        return _tell(error)
    codes: list[int] = []
    outcomes: list[Outcome] = []

    @hydra.main(config_path=str(CONF.resolve()), config_name="config", version_base="1.3")
    def job(config: DictConfig) -> None:
        codes.append(_job(config, outcomes))
        if codes[-1] == STOPPED:  # the whole sweep, not this run alone
            sys.exit(STOPPED)

    try:
        job()
    except COMPOSING_ERRORS as error:
        return _tell(composing_error(error))
    except UserError as error:
        return _tell(error)
    except Exception as error:
        if _is_from_a_job(error):
            raise
        return _tell(composing_error(error))
    if len(outcomes) > 1:
        show(ranking(outcomes))
    return max(codes, default=0)


def _is_from_a_job(error: Exception) -> bool:
    """Return whether a run raised the error; otherwise Hydra did, about something that was typed."""
    return any(frame.f_code is _job.__code__ for frame, _ in walk_tb(error.__traceback__))


def _job(config: DictConfig, outcomes: list[Outcome]) -> int:
    """One run, or one dry run, of a sweep or alone; its plan, or why there is none, is added to ``outcomes``."""
    earlier = len(outcomes)
    directory = Path(HydraConfig.get().runtime.output_dir)
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    try:
        return _plan_and_run(config, directory, outcomes)
    except (UserError, EngineError) as error:
        if isinstance(error, UserError) and len(outcomes) == earlier:
            outcomes.append(Outcome(_overrides(), None, f"{error.path}: {error.fact}"))
        return _tell(error)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # the disk, since what the recipe names is checked before
        return _tell(storage_error(error, directory))
    except KeyboardInterrupt:
        print("interrupted; resume=true goes on from the last checkpoint, if there is one", file=sys.stderr)
        return STOPPED
    finally:
        # Hydra makes the folder of every job, and a job that could not be planned has put nothing there.
        with suppress(OSError):
            directory.rmdir()


def _overrides() -> tuple[str, ...]:
    return tuple(override.lstrip("+") for override in HydraConfig.get().overrides.task)


def _plan_and_run(config: DictConfig, directory: Path, outcomes: list[Outcome]) -> int:
    console = output_console()
    door = front_door_of(config)
    plan, resumed = _plan(config, door, directory.parent.parent)
    outcomes.append(Outcome(_overrides(), plan.prediction))
    show(render(plan, explain=door.explain, width=min(WIDTH, console.width)))
    if door.dry_run:
        _write_plan(plan, directory)
        console.print(f"\nplan: {directory / 'plan.json'}", soft_wrap=True)
        return 0
    if plan.needs_gpus and not resumed and door.plan is None and door.cluster.get("shape") == "auto":
        raise _for_gpus(plan)
    console.print()
    return _run(plan, resumed or directory, console, resume=resumed is not None, tune=door.tune)


def _write_plan(plan: Plan, directory: Path) -> None:
    """Write a plan that is not run. Raises RecipeError for the folder of a run, whose plan it would replace."""
    from rlflow.runtime.checkpoint import checkpoints
    from rlflow.runtime.folder_lock import locked

    with locked(directory):
        if checkpoints(directory):
            raise RecipeError("hydra.run.dir", f"'{directory}' holds a run", fix="another folder")
        write_plan(plan, directory)


def _keys() -> set[str]:
    """Return the keys that were typed."""
    return {override.split("=")[0] for override in _overrides()}


def _for_gpus(plan: Plan) -> PlacementError:
    time = format_duration(plan.prediction.step_seconds)
    return PlacementError(
        "cluster",
        f"{plan.recipe.name} is for GPUs, and none was found on this machine: on its CPU a step would take {time}",
        fix="cluster=2x8 dry_run=true plans two hosts of eight GPUs, cluster=local runs it here nevertheless",
    )


def _plan(config: DictConfig, door: FrontDoor, root: Path) -> tuple[Plan, Path | None]:
    """Return the plan, and the folder of the run that it continues."""
    if door.plan is not None:
        if others := sorted(_keys() - {"plan", "dry_run", "resume", "explain", "tune"}):
            raise RecipeError(
                "plan", f"a plan is whole, and '{others[0]}' would change it", fix=f"leave out {', '.join(others)}"
            )
        plan = read_plan(Path(door.plan))
        return plan, find_run(door.resume, plan.recipe, root)
    config_dir = _config_dir()
    more_steps = _take_more_steps(config)
    recipe = recipe_of(config, config_dir)
    resumed = find_run(door.resume, recipe, root)
    if resumed and more_steps:
        recipe = replace(recipe, steps=steps_behind(resumed) + more_steps)
    cluster = _cluster(door, resumed, config_dir)
    return compile_recipe(recipe, cluster, calibration_of(door, cluster)), resumed


def _take_more_steps(config: DictConfig) -> int:
    """Return the N of ``steps=+N``, and leave a number in its place; 0 where ``steps`` is a number."""
    steps = config.get("steps")
    if not (isinstance(steps, str) and re.fullmatch(r"\+\d+", steps)):
        return 0
    if not config.get("resume"):
        raise RecipeError(
            "steps", f"'{steps}' adds to the steps of an earlier run", fix=f"resume=FOLDER, or steps={steps[1:]}"
        )
    config.steps = int(steps)
    return int(steps)


def _cluster(door: FrontDoor, resumed: Path | None, config_dir: Path | None) -> Cluster:
    """Return the cluster that was typed, that of the run that is continued, or the one of this machine."""
    if door.cluster.get("shape") != "auto":
        return cluster_from(door.cluster)
    if others := sorted(door.cluster.keys() - {"shape"}):
        raise RecipeError(
            f"cluster.{others[0]}", "cluster=auto takes the hosts as they are", fix="name the cluster, as cluster=local"
        )
    if "cluster" in _keys():
        return detect_cluster(config_dir)
    return (cluster_of_run(resumed) if resumed else None) or default_cluster(show_warning, config_dir)


def _config_dir() -> Path | None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    known: Path | None = parser.parse_known_args()[0].config_dir
    return known


def _run(plan: Plan, directory: Path, console: Console, *, resume: bool, tune: Tune) -> int:
    # Imported only now: a dry run needs no torch.
    from rlflow.report.records import MetricsWriter, tuning_table
    from rlflow.runtime.prepare import runtime_of
    from rlflow.runtime.run import run

    observers = [MetricsWriter(), *displays(console)]
    with stop_on_signals(lambda: console.print(STOPPING)) as stopping:
        report = run(plan, directory, runtime_of(plan), observers, resume=resume, stop=stopping.is_set, tune=tune)
    if tune:
        console.print()
        show(tuning_table(directory))
    if report.status == "stopped":
        console.print(f"go on with: python -m rlflow plan={directory}/plan.json resume={directory}", soft_wrap=True)
        return STOPPED
    return 0


def _tell(error: UserError | EngineError) -> int:
    show_error(error)
    return 2 if isinstance(error, UserError) else 1


# A terminal sends the first; Slurm, Kubernetes and `kill` send the second.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(announce: Callable[[], object]) -> Iterator[Event]:
    """Give an event that the first SIGINT or SIGTERM sets, after a call of ``announce``.

    The second one raises KeyboardInterrupt.
    """
    stopping = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        announce()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
