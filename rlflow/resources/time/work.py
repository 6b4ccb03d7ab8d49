"""The work of a forward pass: operations and moved bytes for each token."""

from dataclasses import dataclass
from functools import lru_cache

from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.speed import Speed


@dataclass(frozen=True)
class Work:
    """The work of a forward pass for each token."""

    dense_flops: float
    expert_flops: float
    key_flops: float
    """Operations for each key that a query attends to, over all layers."""
    moved_bytes: float
    """Bytes that elementwise kernels read and write if each is a kernel of its own."""
    adapter_bytes: float
    """Bytes that adapters of all linear layers add to them: casts to fp32 and back, dropout, scale, sum."""
    matrix_bytes: float
    """Bytes that attention reads and writes for each key over all layers, where it stores its whole matrix."""
    model: Architecture

    def flops(self, tokens: float, length: float) -> float:
        """Return the operations for ``tokens`` in sequences of ``length``."""
        return tokens * (self.dense_flops + self.expert_flops + self.key_flops * self.model.attention_span(length))

    def product_seconds(self, speed: Speed, tokens: float, *, spreads_experts: bool = False) -> float:
        """Return the time of matrix products with weights on one GPU with enough memory, for large micro-batches.

        ``spreads_experts``: GPUs have experts of their own, and wait for those whose experts are wanted most.
        """
        balance = speed.efficiency.expert_balance if spreads_experts else 1.0
        experts = self.expert_flops / (speed.efficiency.expert_matmul * balance)
        return tokens * (self.dense_flops + experts) / speed.matmul_of(self.model.hidden_size)

    def other_seconds(
        self,
        speed: Speed,
        tokens: float,
        length: float,
        *,
        fused: bool = False,
        flash: bool = True,
        adapters: bool = False,
        attending: float | None = None,
    ) -> float:
        """Return the time of attention and elementwise kernels on one GPU with enough memory.

        Fused kernels move half as many bytes, apart from those of adapters. Without ``flash`` attention, every query is
        multiplied with every key, and the matrix goes through memory. ``attending`` is the number of queries, where it
        is not that of tokens.
        """
        span = self.model.attention_span(length) if flash else length
        attention = (
            self.key_flops * span / speed.efficiency.attention * (1.0 if attending is None else attending / tokens)
        )
        moved = self.moved_bytes * (0.5 if fused else 1.0) + (0 if flash else self.matrix_bytes * length)
        moved += self.adapter_bytes if adapters else 0.0
        kernels = moved / (speed.memory * speed.efficiency.elementwise)
        return tokens * (attention / speed.matmul_of(self.model.hidden_size) + kernels)


@lru_cache(maxsize=256)
def forward_work(model: Architecture, value_bytes: float = 2) -> Work:
    """Return the work of a forward pass: 2 operations per parameter and token, and more for attention.

    ``value_bytes`` is the size of an activation.

    Attention takes 2 operations for each value of a query, and of its output, and key that it attends to (Kaplan et al.
    2020, table 1). Embeddings are looked up, not multiplied, except as a tied head.
    """
    experts = 0.0
    if model.num_experts and model.num_experts_per_tok:
        experts = model.num_expert_parameters * model.num_experts_per_tok / model.num_experts
    dense = model.num_active_parameters - experts - model.embedding_parameters
    if model.head_parameters == 0:
        dense += model.vocab_size * model.hidden_size
    hidden, attention, moved, adapters = model.hidden_size, 0.0, 0.0, 0.0
    for kind in model.layer_kinds:
        heads = kind.queries + 2 * kind.gate + kind.keys
        # A norm by way of fp32 and the residual sum after it; rotation of q and k; activation and product of the MLP.
        values = kind.num_norms * 11.0 * hidden + 4 * heads + 5 * kind.mlp_width
        if kind.sparse:
            # Tokens copied to their experts' rows and back, and weighed.
            values += 6 * (model.moe_latent_size or hidden) * (model.num_experts_per_tok or 0)
        if kind.recurrent is not None:
            # The convolution, norms of q and k, the recurrence, and the gated norm of its output.
            heads = kind.recurrent.projected_width
            values += 5 * heads
        moved += kind.count * values
        attention += kind.count * (kind.queries + kind.output) * bool(kind.queries)
        adapters += kind.count * (
            6.0 * (5 * hidden + kind.output + kind.mlp_width) + 8.0 * (heads + 2 * kind.mlp_width + 2 * hidden)
        )
    return Work(
        dense_flops=2 * dense + _recurrence_flops(model),
        expert_flops=2 * experts,
        key_flops=2.0 * attention,
        moved_bytes=value_bytes * moved,
        # Every layer reads and casts its input, and casts, scales and adds the products of A and B to its output.
        adapter_bytes=adapters,
        # Scores, their sum with the mask, softmax by way of fp32: written and read.
        matrix_bytes=16.0 * model.num_attention_layers * model.num_attention_heads,
        model=model,
    )


def image_seconds(model: Architecture, speed: Speed, tokens: float, tokens_per_image: float) -> float:
    """Return the time in which one GPU encodes images of ``tokens`` in all."""
    if model.vision is None or not tokens:
        return 0.0
    flops = tokens * model.vision.token_flops(model.hidden_size, tokens_per_image)
    return flops / speed.matmul_of(model.vision.hidden_size)


def training_passes(*, adapters: bool) -> int:
    """Return how often training takes the operations of a forward pass, without recomputation.

    The backward pass takes twice those of the forward pass, or as many where only ``adapters`` have gradients.
    """
    return 2 if adapters else 3


def _recurrence_flops(model: Architecture) -> float:
    """Return the operations of all recurrences for a token.

    Chunks as long as a key has values take three products of a token's values with as many numbers: within the chunk,
    to its state, and from the state before it (Dao & Gu 2024, section 6).
    """
    if model.recurrent is None:
        return 0.0
    return 6.0 * model.recurrent.num_layers * model.recurrent.value_width * model.recurrent.key_head_dim


def muon_seconds(model: Architecture, layout: Layout, speed: Speed) -> float:
    """Return the time in which every rank makes the updates of whole matrices orthogonal, each expert on one of them.

    Each of five steps has 4 m^2 n + 2 m^3 operations for an m x n matrix with m <= n (Jordan et al. 2024), which are
    at most 25 m for each of its values if n is twice as large as m.
    """
    ends = model.embedding_parameters + model.head_parameters
    dense = model.num_parameters - ends - model.num_expert_parameters
    values = dense / layout.tensor_parallel_size + model.num_expert_parameters / layout.expert_parallel_size
    return 25 * model.hidden_size * values / speed.matmul_of(model.hidden_size)
