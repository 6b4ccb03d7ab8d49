"""The bytes that the moments of an update gather from other GPUs, where weights are sharded."""

from dataclasses import dataclass

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import Stage, TrainingMemory


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that are gathered, and of gradients on their way to the ranks that reduce them."""

    at_loss: float
    in_last: float
    """In the backward pass of the last layer, the first that computes gradients."""
    in_layers: float
    at_ends: float


def are_ends_apart(training: TrainingMemory, stage: Stage) -> bool:
    """Return whether embedding and head are gathered one by one: not tied ones, which stay for the whole pass."""
    return training.gathers_apart and stage.ends > stage.head > 0


def gathered_bytes(layout: Layout, training: TrainingMemory, stage: Stage, copies: float) -> Gathered:
    """Return what the moments of an update gather from other GPUs.

    ``copies`` is the result of ``copied_bytes``.
    """
    zero, shared = layout.zero_stage or 0, layout.num_shards > 1
    trained = 1.0 if training.lora is None else 0.0
    embedding = stage.ends - stage.head
    if zero == 3 and training.live_parameters is None:
        return _of_fsdp(layout, training, stage, copies)
    if zero == 3:
        whole = stage.dense + stage.experts
        live = 2 * max(stage.head, embedding, 2 * stage.layer, min(whole, training.live_parameters or 0))
        in_layers = live + trained * training.weights * stage.layer
        return Gathered(live, in_layers, in_layers, live + trained * training.weights * max(stage.head, embedding))
    # DistributedDataParallel's buckets are a copy of the gradients.
    is_bucketed = zero == 0 and shared and training.bucket_elements > 0
    buckets = trained * training.gradients * (stage.dense + stage.experts) if is_bucketed else 0.0
    return Gathered(buckets, buckets, buckets, buckets)


def _of_fsdp(layout: Layout, training: TrainingMemory, stage: Stage, copies: float) -> Gathered:
    trained, shared = 1.0 if training.lora is None else 0.0, layout.num_shards > 1
    # Gradients in bf16, and once more to be reduced.
    reducing = trained * (2 + training.gradients)
    experts = stage.experts_layer if training.gathers_apart and layout.expert_parallel_size > 1 else 0.0
    rest = stage.layer - experts
    # Quantised weights are gathered as they are.
    width = 2.0 if trained else min(2.0, training.weights)
    ahead = width * rest if shared else 0.0
    # Experts arrive in one piece, which is held until they compute gradients.
    layer = width * stage.layer + max(ahead, 2 * experts - copies)
    if experts:
        # The first layer computes its gradients beside the embedding, which is gathered next.
        first = width * stage.layer + max(2 * experts - copies, 2 * (stage.ends - stage.head))
        in_layers = max(first + trained * training.gradients * rest, reducing * experts + 4 * rest - 5 * copies)
    else:
        in_layers = layer + reducing * stage.layer
    if are_ends_apart(training, stage):
        at_head = max(
            max(2 + 2 * trained, reducing) * stage.head + ahead, 2 * stage.head + 2 * stage.layer + 2 * experts
        )
        # The gradient of the head is reduced while the last layer computes half of its own.
        in_last = layer + trained * (training.gradients * stage.head * shared + rest)
        return Gathered(at_head, max(in_last, in_layers), in_layers, max(2.0, reducing) * (stage.ends - stage.head))
    in_layers += 2 * stage.ends + trained * 2 * stage.head
    return Gathered(2 * stage.ends + ahead, in_layers, in_layers, reducing * stage.ends)
