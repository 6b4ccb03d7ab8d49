"""The record of what an engine does, without vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rlflow.engines.serving.activity import ActivityRecorder


class DriverError(Exception):
    pass


def driver(*, fails: bool) -> ModuleType:
    """Return a stand-in for pynvml on a host with three GPUs that compute 10, 20 and 60 % of the time."""

    def rates(handle: int) -> SimpleNamespace:
        if fails:
            raise DriverError
        return SimpleNamespace(gpu=[10, 20, 60][handle])

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=DriverError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID={"GPU-c": 2}.__getitem__,
        nvmlDeviceGetUtilizationRates=rates,
    )
    return module


@pytest.mark.parametrize(
    ("device", "visible", "fails", "share"),
    [
        ("cuda", "1", False, 0.2),
        ("cuda", "0,GPU-c", False, 0.35),
        ("cuda", "1", True, None),
        ("cpu", "1", False, None),
    ],
)
def test_how_much_gpus_compute(
    device: str, visible: str, fails: bool, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("third_party")
    vars(package)["pynvml"] = driver(fails=fails)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.third_party", package)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    recorder = ActivityRecorder(SimpleNamespace(vllm_config=config))
    recorder.record_step([], idle=True)
    assert [second.gpu for second in recorder.take()] == [pytest.approx(share) if share else None]
