"""The checks of ``rlflow doctor --gpu``: on the CPU, with small sizes, and with faults put in."""

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlflow
from rlflow.commands.doctor import command, gpu
from rlflow.commands.doctor.checks import numerics, serving, transfers, updates
from rlflow.commands.doctor.finding import Finding
from rlflow.commands.doctor.gpu import CHECKS, Check, run_check
from rlflow.commands.doctor.machine import Device
from rlflow.engines.causal_lm import attention
from rlflow.engines.causal_lm import output_layer as head
from rlflow.resources.models.architecture import Architecture
from rlflow.runtime.ray.cluster.machine import run_command
from tests.unit.engines.causal_lm.test_attention import one_row_after_another

H100 = Device(index=0, name="NVIDIA H100 80GB HBM3", memory_gib=79.6, used_gib=0.0, driver="580.1", processes=0)
SMALL = Architecture(
    model_type="qwen2",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def attended(kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Check ``kernel``, which bfloat16 goes through as on a GPU."""
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda dtype, device: dtype == torch.bfloat16)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    return numerics.attention("cpu", heads=((4, 2, 8),), groups=((5, (7, 1)), (2, (9,))))


class TestNumerics:
    def test_a_right_kernel_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        output, gradients = attended(one_row_after_another, monkeypatch)
        assert not output.broken
        assert not gradients.broken

    def test_a_kernel_that_sees_the_future_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sees_all(query: Tensor, key: Tensor, value: Tensor, *ends: Any, enable_gqa: bool, **options: Any) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
            return out[0].transpose(0, 1)

        output, gradients = attended(sees_all, monkeypatch)
        assert output.broken
        assert gradients.broken

    def test_a_kernel_that_mixes_key_heads_up_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def flipped(query: Tensor, key: Tensor, value: Tensor, *ends: Any, **options: Any) -> Tensor:
            return one_row_after_another(query, key.flip(1), value.flip(1), *ends, **options)

        assert attended(flipped, monkeypatch)[0].broken

    def test_not_finite_is_never_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nothing(query: Tensor, key: Tensor, value: Tensor, *ends: Any, **options: Any) -> Tensor:
            return one_row_after_another(query, key, value, *ends, **options) * float("nan")

        output, _ = attended(nothing, monkeypatch)
        assert output.broken

    def test_the_output_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def measured() -> list[Finding]:
            return numerics.output_layer("cpu", tokens=24, hidden_size=16, vocabulary=300)

        assert not any(each.broken for each in measured())
        real = head.score_targets

        def hotter(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float, use: Any) -> Tensor:
            return real(hidden, weight, bias, targets, 1.1 * temperature, use)

        monkeypatch.setattr(head, "score_targets", hotter)
        logprobs, *_ = measured()
        assert logprobs.broken


@pytest.mark.slow
def test_tensors_between_processes() -> None:
    (copy,) = transfers.ipc_copy("cpu", shape=(100, 7))
    # 0 to 250 and again, which bfloat16 holds exactly: 700 numbers, twice 0..250 and 0..197.
    assert not copy.broken
    assert copy.fact.endswith(f"; expected sum {2 * sum(range(251)) + sum(range(198))}")
    (reduced,) = transfers.all_reduce("cpu", ranks=2, link_gb_s=1e9, network_gb_s=None, elements=1000)
    assert reduced.broken, "no machine reaches half of 1e9 GB/s"
    assert reduced.fact.endswith("; expected at least 5e+08 GB/s")


@pytest.mark.slow
def test_an_update_by_torch() -> None:
    loss, second = updates.update("cpu", engine="torch", architecture=SMALL, rows=2, prompt_tokens=4, response_tokens=8)
    # ln 64 = 4.159
    assert not loss.broken
    assert not second.broken


def test_the_colocated_run_is_a_recipe_with_a_tensor_of_a_gigabyte() -> None:
    recipe = rlflow.load(serving.overrides("1x1@h100_80gb", serving._WIDE))
    assert {role.engine for role in recipe.roles.values()} == {"deepspeed", "vllm"}
    architecture = recipe.models["policy"].architecture
    assert architecture is not None
    # Qwen2.5-7B: 152,064 tokens of 3,584 numbers, 2 bytes each.
    assert 2 * architecture.embedding_parameters == 1_089_994_752
    plan = rlflow.compile(recipe, "1x1@h100_80gb")
    assert {bundle.gpu for placement in plan.roles.values() for bundle in placement.bundles} == {0}


class TestReport:
    @pytest.fixture
    def check(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
        """Return a check whose process runs the program that a test writes in place of the checks' package."""
        monkeypatch.setattr(
            gpu, "run_command", lambda _, seconds: run_command([sys.executable, str(tmp_path / "p.py")], seconds)
        )
        return Check(title="It", function="numerics:attention", libraries=("torch",), seconds=30)

    def test_findings_become_lines(self, check: Check, tmp_path: Path) -> None:
        finding = Finding.at_most("a", 3, 2)
        (tmp_path / "p.py").write_text(f"print('noise')\nprint({json.dumps(json.dumps([asdict(finding)]))})")
        assert run_check(check, [H100], 100) == [Finding("a", "3; expected at most 2", broken=True)]

    def test_a_crash_says_why(self, check: Check, tmp_path: Path) -> None:
        (tmp_path / "p.py").write_text("raise ValueError('no kernel image')")
        (finding,) = run_check(check, [H100], 100)
        assert finding.broken
        assert "ValueError: no kernel image" in finding.fact

    def test_a_check_that_hangs_ends_at_its_deadline(self, check: Check, tmp_path: Path) -> None:
        (tmp_path / "p.py").write_text("import threading; threading.Event().wait()")
        began = time.monotonic()
        (finding,) = run_check(replace(check, seconds=0.3), [H100], 100)
        assert time.monotonic() - began < 20
        assert finding.broken
        assert "no answer within 0.3 s" in finding.fact

    def test_checks_of_missing_libraries_are_skipped(self, check: Check) -> None:
        (finding,) = run_check(replace(check, libraries=("torch", "no-such-library")), [H100], 100)
        assert finding.skipped
        assert finding.fact == "not installed: no-such-library"
        assert finding.fix == "pip install no-such-library"

    def test_one_gpu_reduces_nothing(self) -> None:
        (finding,) = run_check(CHECKS[-1], [H100], 100)
        assert finding.skipped
        assert finding.fact == "needs 2 GPUs, found 1"

    def test_no_time_is_left(self, check: Check) -> None:
        assert run_check(check, [H100], -1.0)[0].skipped

    def test_engines_get_a_device_that_torch_can_make_the_current_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[int] = []
        monkeypatch.setattr(torch._C, "_cuda_setDevice", made.append, raising=False)
        torch.cuda.set_device(torch.device(inspect.signature(run_check).parameters["device"].default))
        assert made == [0]

    def test_data_sheets(self) -> None:
        # conf/gpu/h100_80gb.yaml: NVLink 4 at 450 GB/s in one direction, a 400 Gb/s card for each GPU.
        assert gpu.data_sheet("NVIDIA H100 80GB HBM3") == {"link_gb_s": 450.0, "network_gb_s": 50.0}
        assert gpu.data_sheet("Unheard of") == {"link_gb_s": None, "network_gb_s": None}

    def test_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(gpu, "devices", lambda: ([], None))
        assert command.main(["--gpu"]) == 1
        assert "nvidia-smi lists no GPU" in capsys.readouterr().out

    def test_every_check_is_a_function_that_takes_its_options(self) -> None:
        for check in CHECKS:
            module, function = check.function.split(":")
            given = dict(check.options)
            if function == "all_reduce":
                given |= {"ranks": 2, "link_gb_s": 1.0, "network_gb_s": 1.0}
            inspect.signature(getattr(import_module(f"rlflow.commands.doctor.checks.{module}"), function)).bind(
                "cuda:0", **given
            )


@pytest.mark.slow
def test_the_lines_that_need_only_torch_and_transformers_import_nothing_else() -> None:
    """A machine may have no more than these."""
    program = (
        "import sys\n"
        "for name in ('hydra', 'ray', 'vllm', 'deepspeed', 'ortools', 'datasets', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "import rlflow.commands.doctor.gpu, rlflow.commands.doctor.command\n"
        "from rlflow.commands.doctor.checks import numerics, serving, transfers, updates\n"
        "assert not any(each.broken for each in numerics.output_layer('cpu', tokens=4, hidden_size=8, vocabulary=16))\n"
        "numerics.attention('cpu', heads=((2, 1, 8),), groups=((2, (3,)),))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
