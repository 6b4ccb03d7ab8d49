"""The memory of the part of a model that reads images, in a pass."""

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture


def encoding_bytes(model: Architecture, layout: Layout, training: TrainingMemory) -> tuple[float, float]:
    """Return the bytes of a layer while images are encoded, and the bytes of all layers until the backward pass.

    Every rank of a sequence encodes all of its images. A part that stays frozen saves nothing.
    """
    tower, patches = model.vision, layout.micro_batch_patches
    if tower is None or patches is None:
        return 0.0, 0.0
    layer = 2.0 * patches * tower.saved_values
    if not training.trains_vision:
        return layer, 0.0
    inputs = 2.0 * patches * tower.hidden_size
    return layer, tower.num_hidden_layers * (inputs if layout.gradient_checkpointing else layer)
