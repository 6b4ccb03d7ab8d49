"""Options and fixtures of all tests."""

import functools
import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from hypothesis import settings

import rlflow
from rlflow.errors import UserError
from tests.direct_pool import DirectPool
from tests.helpers import load
from tests.integration.engine_process import EngineProcess, free_address, processes
from tests.ray_workers import forked_workers

# Imported libraries leave millions of objects behind, which the garbage collector would search many times. Objects from
# before the collection of tests are therefore frozen, and it searches only later ones.
gc.disable()

# Nothing is fetched in a test, and texts are as wide as in a pipe.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false", GOMP_SPINCOUNT="1500"
)
# The test models are so small that a second thread only waits; the other cores run other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases in every run; `HYPOTHESIS_PROFILE=search pytest` looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).parents[1]
CONFIG_DIR = Path(__file__).parent / "conf"
FAKE = ("--config-dir", str(CONFIG_DIR), "recipe=fake")

# Tests that run with each recipe have these few in `make check`, and all in `make test`.
FEW = {"grpo_tiny", "ppo_tiny", "dpo_7b", "grpo_32b"}
NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
# Recipes that need many hosts, with as many.
LARGE = {"dpo_deepseek_v3": "32x8", "grpo_70b": "8x8", "gspo_235b_a22b": "8x8", "gspo_deepseek_v3": "32x8"}
SETS_OF_RECIPES = [
    pytest.param(sorted(FEW), id="few"),
    pytest.param([name for name in NAMES if name not in FEW], marks=pytest.mark.slow, id="others"),
]

# The simulated hosts that test files share, where most plans have room.
HOSTS = "1x3@cpu+1x2@cpu"

Typed = Callable[..., tuple[int, str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts as they are now")


_NUMBERS = count()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put models that recipes make into a folder of the test's own, which is made when it is needed."""
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(_NUMBERS))
    monkeypatch.setenv("RLFLOW_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def direct_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call rewards and environments of nodes in this process, except in tests with the mark ``processes``.

    A run starts two fork servers, each of which takes half a second. Those of other processes stay as they are.
    """
    if request.node.get_closest_marker("processes") is None:
        for user in ("nodes.reward", "nodes.generate", "environments.exchange"):
            monkeypatch.setattr(f"rlflow.{user}.ProcessPool", DirectPool)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with a file in tests/golden; ``--update-golden`` writes the file."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; pytest --update-golden writes it anew"

    return compare


@pytest.fixture
def cases(golden: Callable[[str, str], None]) -> Callable[[str, Callable[..., str]], None]:
    """Return a function that compares answers with a file in tests/golden.

    The file has a line of words for each case, as on a command line, and the indented answer below it.
    """

    def compare(name: str, answer: Callable[..., str]) -> None:
        lines = (ROOT / "tests" / "golden" / name).read_text().splitlines()
        words = [line for line in lines if line and not line.startswith(" ")]
        golden(name, "\n".join(f"{line}\n{indent(answer(*shlex.split(line)), '    ')}\n" for line in words))

    return compare


@pytest.fixture
def refusals(cases: Callable[[str, Callable[..., str]], None]) -> Callable[[str], None]:
    """Return a function that plans the recipes of a file in tests/golden/errors, and compares their errors with it."""

    def refusal(recipe: str, *overrides: str) -> str:
        with pytest.raises(UserError) as raised:
            rlflow.compile(load(f"recipe={recipe}", *overrides), "local")
        assert raised.value.path
        return str(raised.value)

    return lambda name: cases(f"errors/{name}.txt", refusal)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    """Return a function that runs the command line in this process and gives its exit code, output and errors.

    A process of its own takes seconds to load its libraries.
    """
    from hydra.core.global_hydra import GlobalHydra

    from rlflow.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlflow", *arguments])
        GlobalHydra.instance().clear()
        capfd.readouterr()
        code = main()
        out, errors = capfd.readouterr()
        return code, out, errors

    return run


# Engines of all test files share processes: to load the libraries takes longer than to build a small engine.
@pytest.fixture(scope="session")
def vllm_process() -> Iterator[EngineProcess]:
    """Return a process for engines of vLLM on one rank."""
    with processes(1, "vllm") as (started,):
        yield started


@pytest.fixture(scope="session")
def two() -> Iterator[Sequence[EngineProcess]]:
    """Return two processes for engines of two ranks."""
    with processes(2) as started:
        yield started


@pytest.fixture(scope="session")
def single() -> Iterator[Sequence[EngineProcess]]:
    """Return a process for engines that are sharded over one rank."""
    with processes(1) as started:
        yield started


@pytest.fixture(scope="session")
def address() -> str:
    """Return where ``two`` meet."""
    return free_address()


@dataclass
class _Running:
    """The simulated hosts that run now, and what stops them."""

    hosts: str | None = None
    stack: ExitStack = field(default_factory=ExitStack)


_RUNNING = _Running()


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> None:
    """Start simulated hosts for a test file, which may say how many in ``HOSTS``.

    A file that follows and wants the same ones goes on with them.
    """
    from rlflow.recipe.compose import load_cluster
    from rlflow.runtime.ray.cluster.connection import simulated

    wanted = _hosts_of(request.module)
    if _RUNNING.hosts != wanted:
        _RUNNING.stack.enter_context(forked_workers())
        _RUNNING.stack.enter_context(simulated(load_cluster(wanted)))
        _RUNNING.hosts = wanted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> Iterator[None]:
    """Stop simulated hosts when the next file wants others or none."""
    try:
        return (yield)
    finally:
        if _RUNNING.hosts is not None and not _goes_on_with_hosts(item, nextitem):
            _RUNNING.hosts = None
            _RUNNING.stack.close()


def _goes_on_with_hosts(item: pytest.Function, nextitem: pytest.Function | None) -> bool:
    if nextitem is None or nextitem.module is item.module:
        return nextitem is not None
    has_its_own = hasattr(nextitem.module, "hosts")
    return "hosts" in nextitem.fixturenames and not has_its_own and _hosts_of(nextitem.module) == _RUNNING.hosts


def _hosts_of(module: Any) -> str:
    return getattr(module, "HOSTS", HOSTS)


# Test files that use the same processes name them as SHARED_PROCESSES, except for hosts of their own (HOSTS). One
# process of ``pytest -n`` runs them all, one file after another, because the processes take long to start.
_SHARED_PROCESSES = re.compile(r'^SHARED_PROCESSES = "(.+)"$', re.MULTILINE)
_FIXTURES_OF_PROCESSES = {"hosts", "vllm_process", "two", "single"}


# A whole file that is slow.
_SLOW_FILE = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave slow files out of ``make check`` before they are imported, which takes each process seconds.

    Files that are named on the command line are collected: pytest then says which of their tests are left out.
    """
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    if any(argument.partition("::")[0].endswith(".py") for argument in config.args):
        return None
    return _SLOW_FILE.search(collection_path.read_text()) is not None or None


@functools.cache
def _group(file: str) -> str:
    """Return the processes that a test file shares with others, or the file itself if it shares none."""
    named = _SHARED_PROCESSES.search((ROOT / file).read_text())
    return named[1] if named else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let each process of ``pytest -n`` take a whole group at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return _group(super()._split_scope(nodeid))

    return Groups(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put the files that share processes first, because they take longest."""
    files = {item: item.nodeid.split("::")[0] for item in items}
    for item, file in files.items():
        used = _FIXTURES_OF_PROCESSES.intersection(item.fixturenames)
        has_its_own = hasattr(item.module, "hosts") or hasattr(item.module, "HOSTS")
        if used and not has_its_own and _group(file) == file:
            raise pytest.UsageError(f"{file} uses {', '.join(sorted(used))}, and needs a constant SHARED_PROCESSES")
    items.sort(key=lambda item: (_group(files[item]) == files[item], _group(files[item])))
