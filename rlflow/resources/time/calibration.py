"""Measured efficiencies: by kind of GPU and by engine, and as the content of a file."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlflow.errors import RecipeError
from rlflow.resources.cluster import Cluster, Gpu
from rlflow.resources.time.speed import Efficiency
from rlflow.schema import parse

Calibration = Mapping[str, Efficiency]
"""Measured efficiencies by kind of GPU, and by ``engine_key`` where they differ between engines."""


def engine_key(kind: str, engine: str) -> str:
    """Return the key of a calibration for one engine on a kind of GPU."""
    return f"{kind}/{engine}"


CPU_EFFICIENCY = Efficiency(
    memory=0.45,
    attention=0.6,
    cache=1.0,
    prefill_layer_s=0.0,
    decode_message_s=45e-6,
    train_layer_s=1e-3,
    decode_layer_s=0.5e-3,
    decode_step_s=1e-3,
    decode_sequence_s=5e-6,
    pass_sample_s=2e-5,
    call_s=5e-3,
    sync_s=0.05,
    process_gib=0.45,
)
"""The efficiency of a CPU that was not measured, rounded from ``rlflow calibrate`` on two cores of a Xeon."""


def default_efficiency(gpu: Gpu) -> Efficiency:
    """Return the efficiency of a kind of GPU, or of CPU, that was not measured."""
    return CPU_EFFICIENCY if gpu.memory_gib is None else Efficiency()


def calibration_from(mapping: Mapping[str, Any], cluster: Cluster) -> Calibration:
    """Read measured efficiencies; a kind of GPU that ``mapping`` lacks keeps the defaults. Raises RecipeError."""
    if not mapping:
        fact, fix = "the file names no kind of GPU", "write one with: rlflow calibrate"
        raise RecipeError("calibration", fact, known=list(cluster.gpus), fix=fix)
    unknown = [kind for kind in mapping if kind not in cluster.gpus]
    if unknown and len(unknown) == len(mapping):
        fact, fix = f"has no figures for this cluster, only for {unknown}", "measure it: rlflow calibrate"
        raise RecipeError("calibration", fact, known=list(cluster.gpus), fix=fix)
    efficiencies = {}
    for kind, gpu in cluster.gpus.items():
        if kind not in mapping:
            efficiencies[kind] = default_efficiency(gpu)
            continue
        where = f"calibration.{kind}"
        figures = _section(mapping[kind], where)
        engines = _section(figures.pop("engines", None), f"{where}.engines")
        efficiencies[kind] = parse(Efficiency, figures, where)
        for engine, engine_figures in engines.items():
            path = f"{where}.engines.{engine}"
            efficiencies[engine_key(kind, engine)] = parse(Efficiency, figures | _section(engine_figures, path), path)
    return efficiencies


def _section(value: Any, path: str) -> dict[str, Any]:
    """Return a copy of the figures at ``path``; none for null. Raises RecipeError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        fact = f"{value!r} is not valid: expected figures by their names"
        raise RecipeError(path, fact, fix="write keys with values: {KEY: VALUE}")
    return dict(value or {})


def calibration_figures(calibration: Calibration) -> dict[str, Any]:
    """Return the figures that differ from the defaults, as ``calibration_from`` reads them."""
    content: dict[str, Any] = {}
    for key, efficiency in sorted(calibration.items()):
        kind, _, engine = key.partition("/")
        default = calibration.get(kind, Efficiency()) if engine else Efficiency()
        changed = {
            field.name: float(f"{value:.4g}")
            for field in fields(Efficiency)
            if (value := getattr(efficiency, field.name)) != getattr(default, field.name)
        }
        figures = content.setdefault(kind, {})
        if engine:
            figures.setdefault("engines", {})[engine] = changed
        else:
            figures.update(changed)
    return content
