"""Hydra's door: the command line, its exit codes, and no traceback for a mistake of the user's.

0: done. 1: an engine failed. 2: a mistake in the recipe or on the command line. 130: stopped by Ctrl-C or SIGTERM.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

import rlflow
from rlflow.arguments import help_text, hydra_arguments
from rlflow.cluster_detection import default_cluster, detect_cluster
from rlflow.compiler.plan import Plan, compile_recipe, long_time, read_plan, write_plan
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
from rlflow.errors import EngineError, PlacementError, RecipeError, UserError, storage_error
from rlflow.recipe import Tune
from rlflow.report.console import WIDTH, output_console, show, show_error, show_warning
from rlflow.resources.cluster import cluster_from
from rlflow.stopping import stop_on_signals

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
    plan = _plan(config, door)
    outcomes.append(Outcome(_overrides(), plan.prediction))
    show(render(plan, explain=door.explain, width=min(WIDTH, console.width)))
    if door.dry_run:
        _write_plan(plan, directory)
        console.print(f"\nplan: {directory / 'plan.json'}", soft_wrap=True)
        return 0
    if plan.needs_gpus and door.plan is None and door.cluster.get("shape") == "auto":
        raise _for_gpus(plan)
    resumed = _run_to_resume(door.resume, plan, directory)
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
    time = long_time(plan.prediction.step_seconds)
    return PlacementError(
        "cluster",
        f"{plan.recipe.name} is for GPUs, and none was found on this machine: on its CPU a step would take {time}",
        fix="cluster=2x8 dry_run=true plans two hosts of eight GPUs, cluster=local runs it here nevertheless",
    )


def _plan(config: DictConfig, door: FrontDoor) -> Plan:
    options = _keys()
    if door.plan is not None:
        if others := sorted(options - {"plan", "dry_run", "resume", "explain", "tune"}):
            raise RecipeError(
                "plan", f"a plan is whole, and '{others[0]}' would change it", fix=f"leave out {', '.join(others)}"
            )
        return read_plan(Path(door.plan))
    config_dir = _config_dir()
    recipe = recipe_of(config, config_dir)
    if door.cluster.get("shape") != "auto":
        cluster = cluster_from(door.cluster)
    elif others := sorted(door.cluster.keys() - {"shape"}):
        raise RecipeError(
            f"cluster.{others[0]}", "cluster=auto takes the hosts as they are", fix="name the cluster, as cluster=local"
        )
    elif "cluster" in options:
        cluster = detect_cluster(config_dir)
    else:
        cluster = default_cluster(show_warning, config_dir)
    return compile_recipe(recipe, cluster, calibration_of(door, cluster))


def _config_dir() -> Path | None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    known: Path | None = parser.parse_known_args()[0].config_dir
    return known


def _run_to_resume(resume: bool | str, plan: Plan, directory: Path) -> Path | None:
    """The folder of the run that ``resume`` asks for: a path, or the newest of this recipe beside ``directory``."""
    if not resume:
        return None
    if resume is not True:
        return Path(resume)
    root = directory.parent.parent
    candidates = [path for path in root.glob("*/*/plan.json") if _can_be_resumed(path, plan)]
    if not candidates:
        raise RecipeError(
            "resume",
            f"no run of this recipe with a checkpoint below '{root}' (fingerprint {plan.fingerprint})",
            fix="resume=FOLDER, or leave out resume",
        )
    return max(candidates, key=lambda path: path.stat().st_mtime).parent


def _can_be_resumed(path: Path, plan: Plan) -> bool:
    with suppress(UserError):
        same = read_plan(path).fingerprint == plan.fingerprint
        return same and any(path.parent.glob("**/checkpoints/step-*"))
    return False


def _run(plan: Plan, directory: Path, console: Console, *, resume: bool, tune: Tune) -> int:
    # Imported only now: a dry run needs no torch.
    from rlflow.report.engines import EngineReport
    from rlflow.report.failures import Failures
    from rlflow.report.metrics import MetricsWriter
    from rlflow.report.progress import ProgressDisplay
    from rlflow.report.tuning import tuning_table
    from rlflow.runtime.base import Observer
    from rlflow.runtime.choose import runtime_of
    from rlflow.runtime.run import run

    observers: list[Observer] = [
        MetricsWriter(),
        ProgressDisplay(console),
        Failures(console),
        EngineReport(console),
    ]
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
