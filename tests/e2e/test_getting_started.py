"""docs/getting-started.md and the docstring of rlflow.run keep their promises."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import rlflow
from tests.conftest import ROOT

CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), flags=re.DOTALL)


def example() -> str:
    """Return the page's code, followed by the docstring's."""
    _, page = CODE
    docstring = textwrap.dedent(str(rlflow.run.__doc__).partition("Example:\n")[2])
    return f"import os\nos.umask(0o027)\n{page}\n{docstring}"


@pytest.mark.slow
def test_the_examples_run_and_say_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", example()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "accelerator" not in done.stdout, "DeepSpeed's, which transformers imports to save a model"
    weights = list(tmp_path.glob("outputs/*/*/model/actor/model.safetensors"))
    assert len(weights) == 2
    assert {path.stat().st_mode & 0o777 for path in weights} == {0o640}, "those that the umask leaves"
    assert [line.split()[0] for line in done.stdout.splitlines() if "finished" in line] == ["beginner_tiny"] * 2


def test_the_reward_counts_digits() -> None:
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    assert names["digits_right"](["12", "13", ""], [{"answer": "12"}] * 3) == [1.0, 0.5, 0.0]
