from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.resources.cluster import Gpu
from rlflow.schema import parse
from tests.conftest import ROOT

FILES = sorted((ROOT / "conf" / "gpu").glob("*.yaml"))


def gpu(path: Path) -> Gpu:
    mapping: Any = OmegaConf.to_container(OmegaConf.load(path))
    return parse(Gpu, mapping, path.stem)


def test_every_kind_has_all_figures(subtests: pytest.Subtests) -> None:
    for path in FILES:
        with subtests.test(path.stem):
            kind = gpu(path)
            assert kind.memory_gb_s
            assert kind.link_gb_s
            assert kind.network_gb_s
            assert kind.peak_tflops is not None
            assert {"float32"} < set(kind.peak_tflops) <= {"float32", "float16", "bfloat16", "float8"}
            # A narrower type is never slower.
            ordered = [kind.peak_tflops[name] for name in ("float32", "bfloat16", "float8") if name in kind.peak_tflops]
            assert ordered == sorted(ordered)
            assert (kind.memory_gib is None) is (path.stem == "cpu")


def test_names_of_devices_tell_the_kind() -> None:
    names = [name for path in FILES if (name := gpu(path).device_name)]
    assert len(set(names)) == len(names) >= 15
