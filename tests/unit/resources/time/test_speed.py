from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.errors import PlacementError, RecipeError
from rlflow.recipe.compose import compose, load_calibration, load_cluster, options_from_config
from rlflow.resources.cluster import Gpu, cluster_from
from rlflow.resources.time.calibration import calibration_from
from rlflow.resources.time.speed import Efficiency, Speed, gpu_speed

H100 = Gpu(
    memory_gib=79.6, peak_tflops={"bfloat16": 989.4}, memory_gb_s=3350, link_gb_s=450, network_gb_s=50, source="here"
)


def speed(**efficiency: float) -> Speed:
    return gpu_speed(H100, 8, Efficiency(**efficiency))


@pytest.mark.parametrize(("peak", "memory", "best"), [(312, 2039, 0.869), (989.4, 3350, 0.801), (2250, 7700, 0.776)])
def test_the_best_products_reach_what_was_measured(peak: float, memory: float, best: float) -> None:
    gpu = Gpu(peak_tflops={"bfloat16": peak}, memory_gb_s=memory, source="here")
    reached = gpu_speed(gpu, 8, Efficiency(matmul=1)).matmul / (peak * 1e12)
    assert reached == pytest.approx(best, abs=0.025)


def test_rings_use_all_links_between_hosts_and_exchanges_only_their_own() -> None:
    fast = speed(link=1)
    assert fast.ring(8) == fast.exchange(8) == 450e9
    assert fast.ring(16) == 400e9
    # Half of 16 GPUs are on another host.
    assert fast.exchange(16) == pytest.approx(100e9)


def test_tokens_that_are_forwarded_cross_the_network_once_for_each_host() -> None:
    """On 16 GPUs 7.5 of 8 experts are elsewhere, 4 of them on the other host; 6.05 of the other GPUs have any."""
    fast = speed(link=1)
    assert fast.dispatch_s(16, 8, forwards=False) == pytest.approx(7.5 / 100e9)
    assert fast.dispatch_s(16, 8, forwards=True) == pytest.approx((1 - 0.5**8) / 50e9)
    # Inside a host only links are used.
    assert fast.dispatch_s(8, 8, forwards=True) == pytest.approx(7 * (1 - (7 / 8) ** 8) / 450e9)


def test_messages_between_hosts_take_longer_unless_the_same_links_join_them() -> None:
    assert speed().message_s(16) == 3 * speed().message_s(8)
    rack = gpu_speed(
        Gpu(peak_tflops={"bfloat16": 1.0}, memory_gb_s=1, link_gb_s=900, network_gb_s=900, source=""), 4, Efficiency()
    )
    assert rack.message_s(32) == rack.message_s(4)


def test_older_kinds_have_only_half_precision() -> None:
    v100 = Gpu(peak_tflops={"float16": 125.0, "float32": 15.7}, memory_gb_s=900, source="here")
    assert gpu_speed(v100, 8, Efficiency()).flops == 15.7e12


def test_a_kind_without_figures_is_refused() -> None:
    with pytest.raises(PlacementError, match="has no peak_tflops"):
        gpu_speed(Gpu(memory_gib=80, source="here"), 8, Efficiency())
    with pytest.raises(PlacementError, match="has no memory_gb_s"):
        gpu_speed(Gpu(peak_tflops={"bfloat16": 1.0}, source="here"), 8, Efficiency())


def test_calibration_is_by_kind_and_strict() -> None:
    gpus = {kind: {"memory_gib": 80.0, "source": "here"} for kind in ("a", "b")}
    cluster = cluster_from({"shape": "1x8@a+1x8@b", "gpus": gpus})
    found = calibration_from({"a": {"matmul": 0.5}}, cluster)
    assert (found["a"].matmul, found["b"]) == (0.5, Efficiency())
    with pytest.raises(RecipeError, match=r"calibration\.a\.matmul"):
        calibration_from({"a": {"matmul": 1.5}}, cluster)
    with pytest.raises(RecipeError, match="no figures for this cluster"):
        calibration_from({"c": {}}, cluster)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cpu: [1, 2]", "calibration.cpu: [1, 2] is not valid: expected figures by their names"),
        ("cpu: x", "calibration.cpu: 'x' is not valid: expected figures by their names"),
        ("cpu: 5", "calibration.cpu: 5 is not valid: expected figures by their names"),
        ("cpu: {engines: [torch]}", "calibration.cpu.engines: ['torch'] is not valid: expected figures by their names"),
        ("cpu: {engines: {torch: fast}}", "calibration.cpu.engines.torch: 'fast' is not valid: expected figures by"),
        ("cpu: {call_s: .nan}", "calibration.cpu.call_s: nan is not valid: input should be a finite number"),
        ("true: {call_s: 1}", "calibration: the key True is not a text"),
    ],
)
def test_a_calibration_that_is_no_calibration(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    options = options_from_config(compose(["recipe=grpo_tiny", f"calibration={path}"]))
    with pytest.raises(RecipeError) as raised:
        load_calibration(options, load_cluster("local"))
    assert str(raised.value).startswith(message)
    assert raised.value.notes["Fix"]


@pytest.mark.parametrize("content", ["cpu:", "cpu: {engines:}", "cpu: {engines: {torch:}}"])
def test_a_calibration_may_leave_out_figures(content: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    options = options_from_config(compose(["recipe=grpo_tiny", f"calibration={path}"]))
    assert load_calibration(options, load_cluster("local"))["cpu"].matmul == 0.9


def test_power_that_does_not_sustain_the_peak_makes_matrix_products_slower() -> None:
    gpu = replace(H100, sustained=0.5)
    assert gpu_speed(gpu, 8, Efficiency()).flops == 0.5 * gpu_speed(H100, 8, Efficiency()).flops
    assert gpu_speed(gpu, 8, Efficiency(peak_tflops=100.0)).flops == 100e12
