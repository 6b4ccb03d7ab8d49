"""The time of generation in batches, by a library without an engine. rlflow has no such engine itself."""

from math import ceil

from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoder import decoder_of
from rlflow.resources.time.decoding import Requests
from rlflow.resources.time.speed import Speed


def padded_generation(
    model: Architecture,
    layout: Layout,
    speed: Speed,
    requests: Requests,
    *,
    batch: float,
    layer_s: float | None = None,
    gather_s: float = 0,
) -> tuple[float, float]:
    """Predict the seconds of reading prompts, and of batches one after another, each until its longest response ends.

    A layer takes at least ``layer_s``, the launch of its kernels, by default as in training. Every step copies the KV
    cache to make room for one more token: read, written, and read (transformers, DynamicCache). Sharded weights are
    gathered for every step, in ``gather_s``.
    """
    sequences, responses, prompt = requests.sequences, requests.responses, requests.prompts.mean
    decoder = decoder_of(model, layout.tensor_parallel_size, layout.pipeline_parallel_size, speed, 2)
    batch = min(batch, sequences)
    launch = model.num_hidden_layers * (speed.efficiency.train_layer_s if layer_s is None else layer_s)
    context = prompt + responses.longest_of(batch) / 2
    moved = decoder.seconds(batch, context) + 2 * batch * decoder.key_seconds(context)
    step = max(moved, launch + speed.efficiency.decode_step_s, gather_s)
    prefill = decoder.prefill(speed, sequences * prompt, prompt)
    return prefill, ceil(sequences / batch) * responses.longest_of(batch) * step
