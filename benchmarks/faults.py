"""Inject faults into runs on simulated hosts.

``python -m benchmarks.faults [--quick] [--faults N] [--engine torch|fsdp] [--json FILE]``

A run trains a tiny model on Ray, with ``torch`` in one process or with ``fsdp`` in two, with two hosts, two engines, a
reference and a reward. Several faults happen to it, drawn from a seed: SIGKILL of a worker, an engine, a host, the
driver or Ray's control service; SIGSTOP; a call that is 20 times as slow, raises, is delayed or never ends; a result
that is lost, doubled or corrupted; a full disk; no memory. A run that a fault ends is resumed, until it is finished. It
must then have the weights, metrics and samples of an undisturbed run, and leave no processes and no other files. A
fault that ends it must do so with an error of rlflow.

``--dropped N`` adds N runs of three steps of 512 rollouts, in which one of two engines forgets one in 256 requests.

In most runs the time limits of processes are a few seconds instead of rlflow's own, which every eighth run has. On two
cores, 200 faults take about 40 minutes, ``--quick`` a minute, and 500 runs that forget rollouts almost two hours.
"""

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.fault_hosts import stop_shared_hosts
from benchmarks.fault_injection import Fault
from benchmarks.fault_runs import LONG, SHORT_SILENCE_S, SMALL, WIDE, Outcome, Size, Trial, plan_of, undisturbed
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.runtime.ray.waits import SILENCE_S

_FAULTS = 200
_LANES = 2
_FAULTS_PER_RUN = 5
# One of two engines forgets one rollout of a step of 512.
_ONE_IN = WIDE.num_prompts * WIDE.group_size // 2
# One in so many runs has faults that end Ray too; one in so many has rlflow's own time limits.
_WITH_RAY, _USUAL_LIMITS = 3, 8
_WORKERS = (("update", "actor"), ("sync", "actor"), ("save", "actor"), ("reference", "reference"), ("score", "rewards"))
_ENGINES = (("generate", "rollout"), ("sync", "rollout"))
_DRIVER = (("advantage", "driver"),)
_RESULTS = (("generate", "rollout"), ("sync", "rollout"), *_WORKERS[3:], *_DRIVER)
# The stages in which each kind of fault may happen, and the role whose process it hits.
_KINDS: Mapping[str, Sequence[tuple[str, str]]] = {
    "kill worker": _WORKERS,
    "kill engine": _ENGINES,
    "stop": (*_WORKERS, *_ENGINES),
    "slow": (*_WORKERS, *_ENGINES, *_DRIVER),
    "exception": (*_WORKERS, *_ENGINES, *_DRIVER),
    "lost result": _RESULTS,
    "doubled result": _RESULTS,
    "corrupted result": _RESULTS,
    "full disk": (("save", "actor"), ("save", "driver")),
    "delayed call": (*_WORKERS, *_ENGINES),
    "dropped call": (*_WORKERS, *_ENGINES, ("decode", "rollout")),
    "out of memory": (*_WORKERS, *_ENGINES, *_DRIVER),
}
_KINDS_WITH_RAY: Mapping[str, Sequence[tuple[str, str]]] = {
    "kill host": (*_WORKERS, *_ENGINES, *_DRIVER),
    "kill GCS": (*_WORKERS, *_ENGINES, *_DRIVER),
    "kill driver": (*_WORKERS, *_ENGINES, *_DRIVER),
    # A run notices a stopped host when it waits for a call there.
    "stop host": (("update", "actor"), ("reference", "reference")),
}
_QUICK = (
    ("kill engine", "generate", "rollout"),
    ("slow", "score", "rewards"),
    ("lost result", "sync", "rollout"),
    ("stop", "generate", "rollout"),
    ("kill worker", "reference", "reference"),
    ("doubled result", "sync", "rollout"),
    ("exception", "generate", "rollout"),
    ("delayed call", "update", "actor"),
    ("exception", "sync", "actor"),
    ("doubled result", "generate", "rollout"),
    ("slow", "advantage", "driver"),
    ("slow", "sync", "rollout"),
    ("dropped call", "generate", "rollout"),
    ("dropped call", "decode", "rollout"),
    ("kill engine", "sync", "rollout"),
    ("corrupted result", "generate", "rollout"),
    ("delayed call", "score", "rewards"),
    ("slow", "update", "actor"),
    ("corrupted result", "sync", "rollout"),
    ("full disk", "save", "actor"),
)
_CRASHES, _HOSTS, _STOPS = ("kill worker", "kill engine"), ("kill host",), ("stop", "stop host")
_PROBLEMS = ("hangs", "untyped", "lost", "doubled", "different_weights", "metrics_differ", "leftovers", "unfinished")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs' sizes."""
    yield from (plan_of(folder, size) for size in (SMALL, LONG, WIDE, replace(SMALL, engine="fsdp")))


def faults_of(seed: int, size: Size) -> tuple[list[Fault], bool]:
    """Draw the faults of one run, and whether it has rlflow's own time limits."""
    draw = random.Random(seed)
    usual = seed % _USUAL_LIMITS == _USUAL_LIMITS - 1
    with_ray = seed % _WITH_RAY == _WITH_RAY - 1
    faults = []
    for number in range(_FAULTS_PER_RUN):
        # Faults with and without Ray in turns, so that each run has both.
        kinds = _KINDS_WITH_RAY if with_ray and number % 2 == 0 else _KINDS
        # With rlflow's own limits, a stopped process is noticed after 20 s, but a call that never ends after an hour.
        kind = draw.choice([kind for kind in kinds if not usual or kind != "dropped call"])
        if usual and number == 0:
            kind = "stop"
        stage, role = draw.choice({**_KINDS, **_KINDS_WITH_RAY}[kind])
        rank = draw.randrange(2) if size.ranks(role) == 2 else 0
        faults.append(Fault(number=number, kind=kind, stage=stage, role=role, rank=rank, skip=draw.randrange(2)))
    return faults, usual


def quick_faults(size: Size) -> list[Fault]:
    """Return faults of one run in the order of its stages. The run survives all but the last."""
    return [
        Fault(number=number, kind=kind, stage=stage, role=role, rank=number % size.ranks(role))
        for number, (kind, stage, role) in enumerate(_QUICK)
    ]


def run_quick(folder: Path, engine: str) -> Iterator[Outcome]:
    """Yield the outcome of one run with a few faults."""
    size = replace(LONG, engine=engine)
    expected = undisturbed(folder, size)
    outcome = Trial(folder / "quick", expected, quick_faults(size), usual_limits=False, size=size).run()
    stop_shared_hosts()
    print(outcome.describe(), flush=True)
    yield outcome


def run_trials(folder: Path, wanted: int, engine: str) -> Iterator[Outcome]:
    """Yield the outcomes of runs until ``wanted`` faults have happened."""
    size = replace(SMALL, engine=engine)
    expected = undisturbed(folder, size)
    stop_shared_hosts()
    happened = 0
    with ProcessPoolExecutor(_LANES, get_context("fork")) as lanes:
        seeds = count()
        while happened < wanted:
            number = min(_LANES * 4, -(-(wanted - happened) // _FAULTS_PER_RUN))
            trials = [
                lanes.submit(Trial(folder / f"run-{seed}", expected, *faults_of(seed, size), size).run)
                for seed in islice(seeds, number)
            ]
            for done in as_completed(trials):
                outcome = done.result()
                happened += len(outcome.ends)
                print(f"{happened} faults; {outcome.describe()}", flush=True)
                yield outcome


def run_forgetful(folder: Path, wanted: int) -> Iterator[Outcome]:
    """Yield the outcomes of ``wanted`` runs, in which one of two engines forgets one in 256 requests."""
    expected = undisturbed(folder, WIDE)
    stop_shared_hosts()
    trials = [
        Trial(
            folder / f"forgetful-{seed}",
            expected,
            (),
            usual_limits=True,
            size=WIDE,
            forgets_one_in=_ONE_IN,
            forgets_seed=seed,
        )
        for seed in range(wanted)
    ]
    with ProcessPoolExecutor(_LANES, get_context("fork")) as lanes:
        for done in as_completed([lanes.submit(trial.run) for trial in trials]):
            print(done.result().describe(), flush=True)
            yield done.result()


@dataclass
class _Kind:
    ends: Counter[str]
    detections: list[float]


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return how the faults of each kind ended."""
    kinds: dict[str, _Kind] = defaultdict(lambda: _Kind(Counter(), []))
    for outcome in outcomes:
        for end in outcome.ends:
            kinds[end.fault.kind].ends[end.how] += 1
            kinds[end.fault.kind].detections += [] if end.detection is None else [end.detection]
    columns = sorted({how for kind in kinds.values() for how in kind.ends})
    table = Table("kind", "number", *columns, "slowest detection")
    for name in (*_KINDS, *_KINDS_WITH_RAY):
        kind = kinds[name]
        slowest = f"{max(kind.detections):.1f} s" if kind.detections else ""
        numbers = [str(kind.ends[how] or "") for how in columns]
        table.add_row(name, str(kind.ends.total()), *numbers, slowest)
    return table


def figures_of(outcomes: Sequence[Outcome], wanted: int) -> tuple[dict[str, float | bool], dict[str, Goal]]:
    """Return the figures of all runs, and their goals. ``wanted`` is the number of faults that must have happened."""
    total = sum((outcome.problems for outcome in outcomes), Counter[str]())
    ends = [(outcome, end) for outcome in outcomes for end in outcome.ends]
    figures: dict[str, float | bool] = {"runs": len(outcomes), "faults": len(ends)}
    figures["compared"] = sum(outcome.compared for outcome in outcomes)
    figures["completed_by_themselves"] = sum(end.how == "continued" for _, end in ends)
    figures |= {name: total[name] for name in _PROBLEMS}

    def seconds(kinds: Collection[str], usual: bool | None = None) -> list[float]:
        chosen = [end for outcome, end in ends if usual in (None, outcome.usual_limits) and end.fault.kind in kinds]
        return [end.detection for end in chosen if end.detection is not None]

    figures["slowest_end_s"] = max((outcome.slowest_end_s for outcome in outcomes), default=0.0)
    detections = {
        "slowest_crash_s": seconds(_CRASHES),
        "slowest_host_s": seconds(_HOSTS),
        "slowest_stopped_s": seconds(_STOPS, usual=True),
        "slowest_stopped_short_s": seconds(_STOPS, usual=False),
        "slowest_detection_s": seconds({**_KINDS, **_KINDS_WITH_RAY}),
    }
    # Kinds of faults that did not happen have no figure.
    figures |= {name: max(times) for name, times in detections.items() if times}
    goals = {name: Goal("exactly 0", total[name] == 0) for name in _PROBLEMS}
    limits = {
        "slowest_crash_s": 1.0,
        "slowest_host_s": 5.0,
        "slowest_stopped_s": SILENCE_S[0] + 1,
        "slowest_stopped_short_s": SHORT_SILENCE_S + 1,
        "slowest_detection_s": 31.0,
    }
    goals |= {
        name: Goal(f"at most {limit:g}", figures[name] <= limit) for name, limit in limits.items() if name in figures
    }
    goals["faults"] = Goal(f"at least {wanted}", len(ends) >= wanted)
    goals["compared"] = Goal("every run", figures["compared"] == len(outcomes))
    goals |= {name: Goal("any", True) for name in ("runs", "completed_by_themselves", "slowest_end_s")}
    return figures, goals


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.faults")
    parser.add_argument("--quick", action="store_true", help=f"{len(_QUICK)} faults, in one run")
    parser.add_argument("--faults", type=int, default=_FAULTS)
    parser.add_argument(
        "--dropped", type=int, default=0, help="runs in each step of which one of 512 rollouts is forgotten"
    )
    parser.add_argument("--engine", choices=("torch", "fsdp"), default="torch", help="the engine that trains")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import_libraries()
    with TemporaryDirectory(prefix="rlflow-faults-") as temporary:
        folder = Path(temporary)
        engine = options.engine
        trials = run_quick(folder, engine) if options.quick else run_trials(folder, options.faults, engine)
        outcomes = list(trials)
        forgetful = list(run_forgetful(folder, options.dropped)) if options.dropped else []
    Console().print(table_of(outcomes))
    figures, goals = figures_of(outcomes, len(_QUICK) if options.quick else options.faults)
    if forgetful:
        total = sum((outcome.problems for outcome in forgetful), Counter[str]())
        expected = options.dropped * WIDE.steps
        figures |= {"dropped_runs": sum(outcome.compared for outcome in forgetful)}
        figures |= {"dropped": sum(outcome.num_forgotten for outcome in forgetful), "dropped_bad": total.total()}
        goals["dropped_runs"] = Goal(f"exactly {options.dropped}", figures["dropped_runs"] == options.dropped)
        goals["dropped"] = Goal(f"at least {expected}", figures["dropped"] >= expected)
        goals["dropped_bad"] = Goal("exactly 0", total.total() == 0)
    return finish("faults", figures, goals, options.json)


def import_libraries() -> None:
    """Import everything that a run needs, so that forked processes share it. Threads do not survive a fork."""
    import accelerate.utils.other  # type: ignore[import-untyped]  # noqa: F401
    import torch
    import torch.utils.tensorboard
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    from rlflow.runtime.objects.ray_api import import_ray

    import_ray()
    torch.set_num_threads(1)


if __name__ == "__main__":
    raise SystemExit(main())
