"""What a token's way through a model costs, before it is cut up: operations, and bytes that are moved besides."""

from dataclasses import dataclass
from functools import lru_cache

from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.speed import Speed


@dataclass(frozen=True)
class Work:
    """Of a forward pass, for each token."""

    dense_flops: float
    expert_flops: float
    key_flops: float
    """For each key that a query attends to, over all layers."""
    moved_bytes: float
    """That elementwise kernels read and write, each kernel of its own."""
    matrix_bytes: float
    """That attention reads and writes for each key, over all layers, where it keeps its whole matrix."""
    model: Architecture

    def flops(self, tokens: float, length: float) -> float:
        """Of ``tokens`` of sequences of ``length``."""
        return tokens * (self.dense_flops + self.expert_flops + self.key_flops * self.model.attention_span(length))

    def seconds(self, speed: Speed, tokens: float, length: float, *, fused: bool = False, flash: bool = True) -> float:
        """On one GPU with room for it. Fused kernels move half as much. Without ``flash`` attention, every query is
        multiplied with every key, and the matrix goes through memory.
        """
        efficiency = speed.efficiency
        span = self.model.attention_span(length) if flash else length
        attention = self.key_flops * span / efficiency.attention
        experts = self.expert_flops / (efficiency.expert_matmul * efficiency.expert_balance)
        moved = self.moved_bytes * (0.5 if fused else 1.0) + (0 if flash else self.matrix_bytes * length)
        return tokens * ((self.dense_flops + experts + attention) / speed.matmul + moved / speed.memory)


@lru_cache(maxsize=256)
def work_of(model: Architecture) -> Work:
    """2 operations a parameter and token, and 2 for each value of a query, and of its output, and key that it attends
    to (Kaplan et al. 2020, table 1). Embeddings are looked up, not multiplied, except as a tied head.
    """
    experts = 0.0
    if model.num_experts and model.num_experts_per_tok:
        experts = model.num_expert_parameters * model.num_experts_per_tok / model.num_experts
    dense = model.num_active_parameters - experts - model.embedding_parameters
    if model.head_parameters == 0:
        dense += model.vocab_size * model.hidden_size
    hidden, heads = model.hidden_size, model.query_width + model.key_value_width
    # Two norms by way of fp32, two residual sums; rotation of q and k; activation and product of the MLP.
    values = 22 * hidden + 4 * heads + 5 * model.mlp_width
    # Tokens copied to their experts' rows and back, and weighed.
    values += 6 * hidden * (model.num_experts_per_tok or 0)
    return Work(
        dense_flops=2 * dense,
        expert_flops=2 * experts,
        key_flops=2.0 * model.num_hidden_layers * (model.query_width + model.output_width),
        moved_bytes=2.0 * model.num_hidden_layers * values,
        # Scores, their sum with the mask, softmax by way of fp32: written and read.
        matrix_bytes=16.0 * model.num_hidden_layers * model.num_attention_heads,
        model=model,
    )
