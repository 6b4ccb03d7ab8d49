import os

import pytest

from rlflow.commands.doctor import probes


def test_a_probe_counts_gpus_like_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a probe counts like nvidia-smi, whatever this one does."""
    orders: list[str | None] = []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr("sys.argv", ["probes", "cuda"])
    monkeypatch.setitem(probes.PROBES, "cuda", lambda: orders.append(os.environ["CUDA_DEVICE_ORDER"]))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    probes.main()
    assert orders == ["PCI_BUS_ID"]
