"""Memory of GPUs while the weights of a trained role go to the engines that follow it, as named terms in GiB."""

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.processes import NO_SHARP, Sharp, graphs_gib, process_terms
from rlflow.resources.memory.state import Training, kept_buffers, stages, state_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import adapter_parameters

# vLLM's for weights that are sent together, unless a single one is larger (weight_transfer/packed_tensor.py,
# DEFAULT_PACKED_BUFFER_SIZE_BYTES).
PACKED_GIB = 1.0


def sync_terms(
    model: Architecture,
    layout: Layout,
    training: Training,
    engine: Layout | None = None,
    *,
    weight_bytes: float = 2,
    packed_bytes: float | None = None,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Return the terms of a trained role while its weights go to an engine that follows it.

    The weights are there, and in the engine's type its largest layer or an end of the model whole, or its adapters.
    With ``engine``, that one is on the same GPUs: its weights and graphs are there, its KV cache comes back afterwards.
    ``packed_bytes`` are those of a parameter in vLLM's buffer for CUDA IPC, where the weights go through it.
    """
    largest = max(max(stage.layer, stage.ends) for stage in stages(model, layout)) * layout.tensor_parallel_size
    if training.lora is not None:
        largest = adapter_parameters(model, training.lora)
    terms = {"weights": state_terms(model, layout, training)["weights"], "gathered": weight_bytes * largest / GIB}
    if engine is not None:
        terms["engine"] = weight_bytes * max(stage.dense + stage.experts for stage in stages(model, engine)) / GIB
        terms["graphs"] = 0.0 if engine.eager else graphs_gib(model)
        terms |= {f"engine {name}": gib for name, gib in process_terms(engine, sharp).items()}
        if packed_bytes is not None:
            terms |= _packed_terms(model, engine, weight_bytes, packed_bytes)
    return terms | kept_buffers(layout, training) | process_terms(layout, sharp)


def packed_gib(model: Architecture, packed_bytes: float) -> float:
    """Return the size of the buffer in which a role sends its weights to an engine on the same GPUs."""
    return max(PACKED_GIB, packed_bytes * model.largest_tensor / GIB)


def _packed_terms(model: Architecture, engine: Layout, weight_bytes: float, packed_bytes: float) -> dict[str, float]:
    """Return the sender's buffer, and what vLLM makes of it: a copy of each of its tensors, copies of tensors whose
    layer is not complete, and the engine's part of a layer that is (model_loader/reload/layerwise.py)."""
    buffer = packed_gib(model, packed_bytes)
    incomplete = packed_bytes * model.largest_module
    complete = weight_bytes * model.largest_module / engine.tensor_parallel_size
    return {"buffer": buffer, "engine buffer": buffer + (incomplete + complete) / GIB}
