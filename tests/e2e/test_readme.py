"""README.md and the pages beside it are true: their commands run and print what the pages show."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Typed

README = (ROOT / "README.md").read_text()
RECIPES_PAGE = (ROOT / "docs" / "recipes.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [
    README,
    (ROOT / "CONTRIBUTING.md").read_text(),
    *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))),
]
BLOCKS = [block for page in PAGES for block in re.findall(r"```(\w*)\n(.*?)```", page, flags=re.DOTALL)]
SHOWN = [block for language, block in BLOCKS if language == "console" and block.startswith("$ rlflow")]
# A dry run prints the same everywhere; a run also prints times.
CONSOLE = [block for block in SHOWN if "dry_run=true" in block.splitlines()[0]]
RUNS = [block for block in SHOWN if block not in CONSOLE and len(block.splitlines()) > 1]
# Commands in the text, and those in blocks that run a recipe of the repository as it is, or with other sizes.
_TYPED = [
    *re.findall(r"`(rlflow [^`]*dry_run=true)`", "\n".join(PAGES)),
    *(
        line.partition(" #")[0].strip()
        for _, block in BLOCKS
        for line in re.findall(r"^(?:\.venv/bin/)?(rlflow [a-z][^\s=]*=.*)", block, re.MULTILINE)
        if not re.search(r"my_|mine|calibration=|\\$", line)
    ),
]
PLANNED = {block.splitlines()[0].removeprefix("$ ") for block in CONSOLE}
TYPED = sorted({line if "dry_run=true" in line else f"{line} dry_run=true" for line in _TYPED} - PLANNED)


def run(command: str, typed: Typed) -> tuple[int, str]:
    """Run a ``rlflow`` command; return its exit code, and its output followed by its errors."""
    program, *arguments = shlex.split(command)
    assert program == "rlflow"
    code, out, errors = typed(*arguments)
    return code, out + errors


def lines(text: str) -> list[str]:
    """Return the lines of ``text`` without trailing spaces and without the time in the run's folder."""
    return [re.sub(r"outputs/\S+/", "outputs/", line.rstrip()) for line in text.strip().splitlines()]


def shows(shown: list[str], printed: list[str]) -> bool:
    """Return whether ``shown`` is what was printed, where a line of three dots stands for any number of lines."""
    pattern = "".join(r"(.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def own_recipe(folder: Path) -> None:
    """Write the README's example of an own recipe, with its data and its reward, into ``folder``."""
    for language, name in (("json", "train.jsonl"), ("python", "my_rewards.py"), ("yaml", "my_recipe.yaml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
        (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.splitlines()[0])
def test_what_is_shown_is_what_is_printed(block: str, typed: Typed) -> None:
    command, shown = block.removeprefix("$ ").split("\n", 1)
    printed = lines(run(command, typed)[1])
    if "..." in shown.splitlines():
        assert shows(lines(shown), printed), "\n".join(printed)
    else:
        assert printed == lines(shown)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNS, ids=lambda block: block.splitlines()[0])
def test_the_plan_of_a_run_is_what_is_printed(block: str, typed: Typed) -> None:
    command, shown = block.removeprefix("$ ").split("\n", 1)
    *plan, _, file, page = lines(run(f"{command} dry_run=true", typed)[1])
    assert "fingerprint" in plan[-1]
    assert (file, page) == ("plan: outputs/plan.json", "page: outputs/plan.html")
    beginning = lines(shown.partition("...\n")[0])[: len(plan)]
    assert len(beginning) >= 1
    assert plan[: len(beginning)] == beginning


@pytest.mark.slow
@pytest.mark.parametrize("command", TYPED)
def test_commands_have_a_plan(command: str, typed: Typed) -> None:
    code, printed = run(command, typed)
    assert code == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["1x8", "1x1@a100_80gb"])
def test_the_own_recipe_is_planned(cluster: str, typed: Typed, tmp_path: Path) -> None:
    own_recipe(tmp_path)
    assert run(f"rlflow recipe=my_recipe.yaml cluster={cluster} dry_run=true", typed)[0] == 0


def test_the_own_reward_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_recipe(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from my_rewards import correct_and_short  # type: ignore[import-not-found]

    rows = [{"answer": "42"}] * 3
    assert correct_and_short(["so it is 42", "41", "x" * 500 + "42"], rows) == [1.0, 0.0, 0.5]


def test_the_recipe_that_is_explained_is_the_file() -> None:
    shown, *_ = re.findall(r"```yaml\n(.*?)```", RECIPES_PAGE, flags=re.DOTALL)
    assert shown == (ROOT / "recipes" / "grpo_tiny.yaml").read_text()


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    return [Path(line) for line in done.stdout.splitlines() if not line.startswith(".")]


def test_the_tree_is_the_real_one() -> None:
    (tree,) = [block for _, block in BLOCKS if block.startswith("benchmarks/ ")]
    shown = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert shown == {f"{path.parts[0]}/" if len(path.parts) > 1 else path.name for path in tracked_files()}


def test_every_room_is_described() -> None:
    table = ARCHITECTURE.partition("\n## The rooms\n")[2].partition("\n## ")[0]
    described = set(re.findall(r"`([\w/]+(?:\.py|/))`", table))
    inside = [Path(*path.parts[1:]) for path in tracked_files() if path.parts[0] == "rlflow"]
    real = {f"{path.parts[0]}/" if len(path.parts) > 1 else path.name for path in inside}
    assert real - {"__init__.py", "__main__.py", "py.typed"} <= described


def test_files_that_are_described_exist() -> None:
    """A file of the last paragraph's folder may stand there by its name alone."""
    tracked = {str(path) for path in tracked_files()}
    names = {Path(path).name for path in tracked}
    for name in re.findall(r"`([\w/]+\.(?:py|yaml)|[\w/]+/)`", ARCHITECTURE):
        if name.endswith("/"):
            assert any(path.startswith((f"rlflow/{name}", name)) for path in tracked), name
        else:
            assert name in names or name in tracked or f"rlflow/{name}" in tracked, name


def test_names_to_look_for_are_in_the_files_to_open() -> None:
    section = ARCHITECTURE.partition("\n## What to open for a question\n")[2].partition("\n## ")[0]
    checked, missing = 0, []
    for entry in re.split(r"\n(?=\d+\. |\n)", section):
        files = [f"rlflow/{name}" for name in re.findall(r"`([\w/]+\.py)`", entry)]
        text = "\n".join((ROOT / name).read_text() for name in files if (ROOT / name).is_file())
        for name in re.findall(r"`([A-Za-z_]\w+)`", entry) if text else ():
            checked += 1
            missing += [f"{name}: {files}"] if not re.search(rf"\b{name}\b", text) else []
    assert checked > 15
    assert missing == []


def test_files_that_any_page_names_exist() -> None:
    folders = "rlflow|conf|recipes|examples|tests|benchmarks|docs"
    named = {name for page in PAGES for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page) if "NAME" not in name}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def slugs(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)\s:]*)\)", page.read_text()):
            target, _, heading = link.partition("#")
            file = page.parent / target if target else page
            if not file.exists() or (heading and heading not in slugs(file)):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_the_first_screen_installs_runs_and_plans() -> None:
    first = "\n".join(README.splitlines()[:30])
    for text in ("pip install -e", "$ rlflow\n", "eval_after", "dry_run=true", "FITS"):
        assert text in first


def test_the_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("demo", "test", "check"):
        assert f"make {name}" in README
        assert f"\n{name}:" in makefile
