"""The data on the edges of a graph: batches of rows of different lengths, packed, with keys."""

from rlflow.batch.batch import (
    Advantages,
    Divergences,
    Examples,
    Logprobs,
    Metrics,
    Minibatch,
    Pairs,
    Prompts,
    Rewards,
    RolloutAdvantages,
    Rollouts,
    Selection,
    Sequences,
    TokenAdvantages,
    ValueEstimates,
    count_reasons,
    describe_samples,
    known_mean,
)
from rlflow.batch.conversations import Conversations
from rlflow.batch.images import Image, SharedRows, Thumbnail, image_digests, images_of, pack_images
from rlflow.batch.packed import Packed, Records, Repeated
from rlflow.batch.rows import MAX_ROWS, Batch
from rlflow.batch.top_logprobs import TopLogprobs

__all__ = [
    "MAX_ROWS",
    "Advantages",
    "Batch",
    "Conversations",
    "Divergences",
    "Examples",
    "Image",
    "Logprobs",
    "Metrics",
    "Minibatch",
    "Packed",
    "Pairs",
    "Prompts",
    "Records",
    "Repeated",
    "Rewards",
    "RolloutAdvantages",
    "Rollouts",
    "Selection",
    "Sequences",
    "SharedRows",
    "Thumbnail",
    "TokenAdvantages",
    "TopLogprobs",
    "ValueEstimates",
    "count_reasons",
    "describe_samples",
    "image_digests",
    "images_of",
    "known_mean",
    "pack_images",
]
