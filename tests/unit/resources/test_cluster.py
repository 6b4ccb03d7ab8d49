from typing import Any

import pytest

from rlflow.errors import RecipeError
from rlflow.resources.cluster import cluster_from, parse_shape

GPUS = {"h200": {"memory_gib": 140.4, "source": "test"}, "h100_80gb": {"memory_gib": 79.6, "source": "test"}}


@pytest.mark.parametrize(
    ("shape", "terms"),
    [
        ("2x8", [(2, 8, "h100_80gb")]),
        ("7x8+1x7", [(7, 8, "h100_80gb"), (1, 7, "h100_80gb")]),
        ("2x8@h200", [(2, 8, "h200")]),
        ("1x8+2x4@h200", [(1, 8, "h100_80gb"), (2, 4, "h200")]),
    ],
)
def test_shapes(shape: str, terms: list[tuple[int, int, str]]) -> None:
    assert parse_shape(shape) == terms


@pytest.mark.parametrize("shape", ["2y8", "0x8", "2x0", "2x", "x8", "", "2x8+", "2x8@", "-1x8", "2 x 8", "02x8"])
def test_wrong_shapes(shape: str) -> None:
    with pytest.raises(RecipeError, match="is neither a file in conf/cluster nor a shape"):
        parse_shape(shape)


def test_hosts_of_a_shape_and_back() -> None:
    cluster = cluster_from({"shape": "2x8@h200+1x7@h100_80gb", "gpus": GPUS})
    assert [(host.name, host.gpus, host.gpu) for host in cluster.hosts] == [
        ("host-0", 8, "h200"),
        ("host-1", 8, "h200"),
        ("host-2", 7, "h100_80gb"),
    ]
    assert cluster.shape == "2x8@h200+1x7@h100_80gb"
    assert cluster.memory_gib(cluster.hosts[2]) == 79.6


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"hosts": [], "gpus": {}}, "cluster.hosts: no hosts"),
        (
            {"shape": "2x8", "gpus": {**GPUS, "h100": {"memory_gib": 20}}},
            "cluster.gpus.h100: no host has the kind 'h100'.\n  Known: h100_80gb.\n  Fix: did you mean 'h100_80gb'?",
        ),
        (
            {"shape": "2x8", "gpus": {"h100_80gb": {"memory_gib": 81920, "source": "test"}}},
            "cluster.gpus.h100_80gb.memory_gib: 81920 is not valid",
        ),
        ({"hosts": [{"name": "a", "gpus": 0, "gpu": "h200"}], "gpus": GPUS}, "cluster.hosts.0.gpus: 0 is not valid"),
        ({"hosts": [{"name": "a", "gpus": 1, "gpu": "x"}], "gpus": GPUS}, "cluster.hosts.0.gpu: no figures for 'x'"),
        (
            {"shape": "1x8@h200+1x1@cpu", "gpus": {**GPUS, "cpu": {"source": ""}}},
            "some hosts have GPUs and",
        ),
        ({"hosts": [{"name": "a", "gpus": 1, "gpu": "h200"}] * 2, "gpus": GPUS}, "the name 'a' is used twice"),
        (
            {"hosts": [{"name": "a", "gpus": 2, "gpu": "h200", "free": [0, 2]}], "gpus": GPUS},
            "cluster.hosts.0.free: host 'a' has no GPU 2.\n  Known: 0, 1.",
        ),
        (
            {"hosts": [{"name": "a", "gpus": 2, "gpu": "h200", "free": [-1]}], "gpus": GPUS},
            "cluster.hosts.0.free: host 'a' has no GPU -1.",
        ),
        (
            {"hosts": [{"name": "a", "gpus": 2, "gpu": "h200", "free": [1, 1]}], "gpus": GPUS},
            "cluster.hosts.0.free: GPU 1 is given 2 times.\n  Fix: name each free GPU once.",
        ),
        (
            {
                "hosts": [
                    {"name": "a", "gpus": 2, "gpu": "h200", "free": []},
                    {"name": "b", "gpus": 2, "gpu": "h200", "reserved": True},
                ],
                "gpus": GPUS,
            },
            "cluster.hosts: no GPU may be used: every host is reserved or has no free GPU.",
        ),
        (
            {"hosts": [{"name": "a", "gpus": 1, "gpu": "x"}], "gpus": {"x": {"memory_gib": -1, "source": ""}}},
            "-1 is not",
        ),
        *(
            ({"hosts": [{"name": "a", "gpus": count, "gpu": "h200"}] * 2, "gpus": GPUS}, "have more than 16384 GPUs")
            for count in (8193, 200_000, 2**31 - 1)
        ),
        *(
            (
                {"hosts": [{"name": "a", "gpus": 1, "gpu": "x"}], "gpus": {"x": {"source": "", key: value}}},
                f"cluster.gpus.x.{key}: {value} is not valid",
            )
            for key in ("memory_gib", "memory_gb_s", "link_gb_s", "network_gb_s", "price_per_hour")
            for value in (1e300, 2e9)
        ),
        (
            {"hosts": [{"name": "a", "gpus": 1, "gpu": "h200", "memory_gib": 1e300}], "gpus": GPUS},
            "cluster.hosts.0.memory_gib: 1e+300 is not valid",
        ),
    ],
)
def test_wrong_clusters(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        cluster_from(mapping)
    assert message in str(raised.value)


def test_usable_gpus_and_labels() -> None:
    hosts = [
        {"name": "a", "gpus": 8, "gpu": "h200", "free": [6, 7, 1], "labels": ["fast"]},
        {"name": "b", "gpus": 2, "gpu": "h200", "labels": ["fast", "near"]},
        {"name": "c", "gpus": 8, "gpu": "h200", "reserved": True, "free": [0]},
    ]
    cluster = cluster_from({"hosts": hosts, "gpus": GPUS})
    assert [host.usable for host in cluster.hosts] == [(1, 6, 7), (0, 1), ()]
    assert [host.name for host in cluster.hosts if host.has("fast")] == ["a", "b"]
    assert all(host.has("h200") and not host.has("far") for host in cluster.hosts)
    assert cluster.shape == "1x8@h200+1x2@h200+1x8@h200", "all GPUs, whoever may use them"
