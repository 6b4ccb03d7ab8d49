"""Plans and runs a recipe, or a sweep of them: composes with Hydra, and turns errors into messages and exit codes."""

import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import rlflow
from rlflow._version import __version__
from rlflow.commands.calibrate.fit import calibration_of_run
from rlflow.commands.context import cluster_of_run, find_run, num_finished_steps
from rlflow.compiler import compile_recipe
from rlflow.compiler.checks import check_run
from rlflow.compiler.plan import Plan, format_duration, read_plan
from rlflow.errors import (
    EngineError,
    PlacementError,
    RecipeError,
    StorageError,
    UserError,
    below,
    first_line,
    storage_error,
)
from rlflow.recipe.arguments import help_text, hydra_arguments, typed_config_dir
from rlflow.recipe.compose import (
    CONF,
    load_calibration,
    options_from_config,
    recipe_from_config,
    register_sources,
)
from rlflow.recipe.composing_errors import COMPOSING_ERRORS, composing_error
from rlflow.recipe.options import CommandOptions
from rlflow.report.console import output_console, print_picture, show_error, show_warning
from rlflow.report.hub import check_sweep
from rlflow.report.plan_page import write_dry_run
from rlflow.report.ranking import SweepOutcome
from rlflow.report.show import show
from rlflow.report.sweep import sweep_summary
from rlflow.report.sweep_jobs import Job, SweepFolder
from rlflow.resources.cluster import Cluster, cluster_from
from rlflow.resources.time.calibration import Calibration
from rlflow.runtime.protocols import Report
from rlflow.runtime.ray.cluster.free_gpus import default_cluster, detect_cluster
from rlflow.system.stop_signals import STOPPED, stop_on_signals

STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


def main() -> int:
    """Run the command line with this process's arguments; return the exit code."""
    # Makes Hydra raise its errors, which are converted here, instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Idle threads spin only briefly; otherwise two runs on one machine would starve each other.
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")
    # A console script does not put the working directory on the path, but users keep their own modules there.
    if (working_dir := os.getcwd()) not in sys.path:
        sys.path.insert(0, working_dir)
    typed = sys.argv[1:]
    if {"-h", "--help"} & set(typed):
        print(help_text(), end="")
        return 0
    if "--version" in typed:
        print(f"rlflow {__version__}")
        return 0
    register_sources()
    config_dir = typed_config_dir()
    try:
        sys.argv[1:] = hydra_arguments(typed, config_dir)
    except UserError as error:
        return _exit_code(error)
    try:
        return _run_jobs(config_dir)
    except BrokenPipeError:
        _discard_output()
        return 1
    except StorageError as error:
        return _exit_code(error)
    except OSError as error:  # a disk error under the folders of Hydra or of a sweep: jobs report their own
        return _exit_code(storage_error(error, SweepFolder.path or "outputs"))


def _run_jobs(config_dir: Path | None) -> int:
    """Run the job or the sweep of this command line; return the exit code.

    Raises OSError and StorageError for the folders of Hydra and of the sweep.
    """
    codes: list[int] = []

    # A launcher may run this function in another process, which then has its own copy of every variable.
    @hydra.main(config_path=str(CONF.resolve()), config_name="config", version_base="1.3")
    def run_job(config: DictConfig) -> float | None:
        job = _finished_job(config, config_dir)
        codes.append(job.exit_code)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            job.write(Path(HydraConfig.get().sweep.dir), HydraConfig.get().job.num)
        if job.exit_code in STOPPED:  # ends the whole sweep, not only this run
            sys.exit(job.exit_code)
        return job.objective

    with sweep_summary() as codes_of_jobs:
        try:
            run_job()
        except COMPOSING_ERRORS as error:
            return _exit_code(composing_error(error))
        except UserError as error:
            return _exit_code(error)
        except OSError:
            raise
        except Exception as error:
            if _is_raised_by_job(error):
                raise
            return _exit_code(composing_error(error))
    return max([*codes, *codes_of_jobs], default=0)


def _is_raised_by_job(error: Exception) -> bool:
    """Return whether a run raised the error; otherwise Hydra did, for a mistake on the command line."""
    return any(frame.f_code.co_qualname == "JobReturn.return_value" for frame, _ in walk_tb(error.__traceback__))


def _finished_job(config: DictConfig, config_dir: Path | None) -> Job:
    """Plan and run one job, which may be part of a sweep; print an error if it fails."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    job = Job(overrides=_overrides(), folder=str(directory), dry_run=config.dry_run is True)
    try:
        return _plan_and_run(config, job, config_dir)
    except (UserError, EngineError) as error:
        reason = f"{error.path}: {error.fact}" if isinstance(error, UserError) else first_line(error)
        return replace(job, exit_code=_exit_code(error), reason=reason)
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        _discard_output()
        return replace(job, exit_code=1, reason="the output was closed")
    except OSError as error:  # a disk error: files that the recipe names are checked earlier
        return replace(job, exit_code=_exit_code(storage_error(error, directory)), reason=first_line(error))
    except KeyboardInterrupt as interrupt:
        print("interrupted; resume=true continues from the last checkpoint, if there is one", file=sys.stderr)
        return replace(job, exit_code=interrupt.args[0] if interrupt.args else STOPPED[0], reason="interrupted")
    finally:
        # Hydra creates a folder for every job. It stays empty if planning failed.
        with suppress(OSError):
            directory.rmdir()


def _discard_output() -> None:
    """Write nothing more to a closed output, not even when Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overrides() -> tuple[str, ...]:
    return tuple(override.lstrip("+") for override in HydraConfig.get().overrides.task)


def _plan_and_run(config: DictConfig, job: Job, config_dir: Path | None) -> Job:
    console, directory = output_console(), Path(job.folder)
    options = options_from_config(config)
    plan, resumed = _plan(config, options, directory.parent.parent, config_dir)
    check_run(plan.recipe, options)
    outcome = SweepOutcome(job.overrides, plan, options.deadline_hours)
    show(plan, explain=options.explain)
    if outcome.is_late:
        time = format_duration(3600 * plan.cost.hours)
        show_warning(f"the run takes {time}, longer than deadline_hours={options.deadline_hours:g}")
    if options.dry_run:
        write_dry_run(plan, directory)
        console.print(f"\nplan: {directory / 'plan.json'}\npage: {directory / 'plan.html'}", soft_wrap=True)
        return replace(job, deadline_hours=options.deadline_hours, objective=outcome.objective)
    if plan.needs_gpus and not resumed and options.plan is None and options.cluster.get("shape") == "auto":
        raise _no_gpus_error(plan)
    if plan.recipe.evaluation is None and HydraConfig.get().runtime.choices["hydra/sweeper"] != "basic":
        fact = "is missing, and the sweeper needs a score of every run"
        raise RecipeError("evaluation", fix="evaluation={every: 10, num_prompts: 100}", fact=fact)
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        check_sweep(plan)
    code, report = _run_plan(plan, directory, resumed, options)
    return replace(job, folder=report.directory, exit_code=code, objective=report.eval_after)


def _typed_keys() -> set[str]:
    """Return the keys that were set on the command line."""
    return {override.split("=")[0] for override in _overrides()}


def _no_gpus_error(plan: Plan) -> PlacementError:
    time = format_duration(plan.prediction.step_seconds)
    return PlacementError(
        "cluster",
        f"{plan.recipe.name} needs GPUs, and this machine has none; a step on its CPU would take {time}",
        fix="cluster=2x8 dry_run=true to plan for two hosts with eight GPUs, or cluster=local to run on this CPU",
    )


def _plan(config: DictConfig, options: CommandOptions, root: Path, config_dir: Path | None) -> tuple[Plan, Path | None]:
    """Return the plan, and the folder of the run that it continues, if any."""
    if options.plan is not None:
        allowed = {"plan", "dry_run", "resume", "explain", "tune", "trace", "profile", "deadline_hours"}
        if changes := sorted(_typed_keys() - allowed):
            fact = f"a saved plan cannot be changed, got '{changes[0]}'"
            raise RecipeError("plan", fact, fix=f"leave out {', '.join(changes)}")
        plan = read_plan(Path(options.plan))
        return plan, find_run(options.resume, plan.recipe, root)
    more_steps = _take_more_steps(config)
    recipe = recipe_from_config(config, config_dir)
    resumed = find_run(options.resume, recipe, root)
    if resumed and more_steps:
        recipe = replace(recipe, steps=num_finished_steps(resumed) + more_steps)
    cluster = _cluster(options, resumed, config_dir)
    return compile_recipe(recipe, cluster, _calibration(options, cluster)), resumed


def _calibration(options: CommandOptions, cluster: Cluster) -> Calibration:
    """Return the measured efficiencies of a file, or those that a finished run shows."""
    if options.calibration is None or not Path(options.calibration).is_dir():
        return load_calibration(options, cluster)
    with below("calibration"):
        return calibration_of_run(Path(options.calibration), cluster)


def _take_more_steps(config: DictConfig) -> int:
    """Return the N of ``steps=+N`` and replace the text by N in the configuration; return 0 for a plain number."""
    steps = None if OmegaConf.is_interpolation(config, "steps") else config.get("steps")
    if not (isinstance(steps, str) and re.fullmatch(r"\+\d+", steps)):
        return 0
    if not config.get("resume"):
        fact = f"'{steps}' adds to the steps of an earlier run"
        raise RecipeError("steps", fact, fix=f"add resume=FOLDER, or write steps={steps[1:]}")
    config.steps = int(steps)
    return int(steps)


def _cluster(options: CommandOptions, resumed: Path | None, config_dir: Path | None) -> Cluster:
    """Return the cluster from the command line; without one that of the continued run, or this machine."""
    if options.cluster.get("shape") != "auto":
        return cluster_from(options.cluster)
    if keys := sorted(options.cluster.keys() - {"shape"}):
        raise RecipeError(
            f"cluster.{keys[0]}",
            "cluster=auto cannot be combined with other keys of the cluster",
            fix="name a cluster, such as cluster=local",
        )
    if "cluster" in _typed_keys():
        return detect_cluster(config_dir)
    return (cluster_of_run(resumed) if resumed else None) or default_cluster(show_warning, config_dir)


def _run_plan(plan: Plan, directory: Path, resumed: Path | None, options: CommandOptions) -> tuple[int, Report]:
    """Run the plan, and return the exit code and the report."""
    # Imported late, because a dry run does not need it.
    from rlflow.report.records import tuning_table

    console = output_console()
    console.print()
    with stop_on_signals(lambda: console.print(STOPPING)) as stop:
        report = rlflow.run(
            plan,
            directory,
            resume=resumed,
            stop=stop.is_set,
            tune=options.tune,
            trace=options.trace,
            profile=options.profile,
        )
    if options.tune:
        console.print()
        print_picture(tuning_table(Path(report.directory)))
    if report.status == "stopped":
        folder = report.directory
        console.print(f"continue with: rlflow plan={folder}/plan.json resume={folder}", soft_wrap=True)
        return stop.exit_code, report
    return 0, report


def _exit_code(error: UserError | EngineError) -> int:
    """Print the error and return its exit code."""
    show_error(error)
    return 2 if isinstance(error, UserError) else 1
