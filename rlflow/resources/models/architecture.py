"""The arithmetic of a model's architecture."""

from dataclasses import dataclass
from functools import cached_property

from rlflow.resources.models import parameters
from rlflow.resources.models.figures import Figures


def heads_divide(heads: int, keys: int, size: int) -> bool:
    """Whether so many ranks can share ``heads`` evenly, and those of keys and values: whole ones, or copies of one."""
    return heads % size == 0 and (keys % size == 0 or size % keys == 0)


@dataclass(frozen=True, kw_only=True)
class Architecture(Figures):
    """A decoder-only transformer's figures, and how many parameters it has of which kind."""

    @cached_property
    def num_parameters(self) -> int:
        """Embeddings, layers, last norm, head. The sources are named in ``parameters.py``."""
        sparse = self.num_sparse_layers
        layers = (self.num_hidden_layers - sparse) * parameters.layer(self, sparse=False)
        layers += sparse * parameters.layer(self, sparse=True) if sparse else 0
        return self.embedding_parameters + layers + parameters.norm(self) + self.head_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        """Those that one token's way takes: all but the routed experts that it does not go to."""
        if not self.num_experts or not self.num_experts_per_tok:
            return self.num_parameters
        idle = self.num_experts - self.num_experts_per_tok
        return self.num_parameters - self.num_sparse_layers * idle * parameters.expert(self)

    @cached_property
    def num_expert_parameters(self) -> int:
        """All routed experts of all layers, without routers and shared experts."""
        return self.num_sparse_layers * (self.num_experts or 0) * parameters.expert(self)

    @cached_property
    def embedding_parameters(self) -> int:
        """Of tokens, and of positions where these are learned. Serve as the head too, if that is tied."""
        return self.vocab_size * self.hidden_size + parameters.positions(self)

    @cached_property
    def head_parameters(self) -> int:
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @cached_property
    def num_outputs(self) -> int:
        """Numbers that the head makes of a token."""
        return self.vocab_size

    @cached_property
    def layer_parameters(self) -> int:
        """Of the largest layer, with all its experts."""
        dense = parameters.layer(self, sparse=False) if self.num_sparse_layers < self.num_hidden_layers else 0
        return max(dense, parameters.layer(self, sparse=True) if self.num_sparse_layers else 0)

    @cached_property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor."""
        return parameters.largest_tensor(self)

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest part that vLLM loads as one: an end of the model, or all experts of a layer."""
        experts = (self.num_experts or 0) * parameters.expert(self) if self.num_sparse_layers else 0
        return max(self.largest_tensor, experts)

    @cached_property
    def num_tensors(self) -> int:
        """Of the weights' file: about nine a layer, and three an expert."""
        return 9 * self.num_hidden_layers + 3 * self.num_sparse_layers * (self.num_experts or 0)
