"""The models and the batches of the comparison, and the operations that an update of them takes.

Shapes: B rows, T response tokens of all rows.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The dense peak of H100 and H200 (SXM) for bfloat16, from NVIDIA's data sheets.
PEAK_FLOPS = 989.4e12
LEARNING_RATE = 1e-9
"""So small that no weight changes: every update of every system computes the same loss."""
MAX_GRAD_NORM = 1.0
CLIP_EPS = 0.2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of the Qwen2 family with random weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    micro_batch_tokens: int
    """Tokens of a pass that fit a GPU of 80 GB without computing activations again."""
    vocab_size: int = 151_936

    def config(self) -> dict[str, Any]:
        """Return the fields of the model's ``config.json``."""
        fields = asdict(self)
        del fields["micro_batch_tokens"]
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        return {"model_type": "qwen2", "max_position_embeddings": 32_768, "rope_parameters": rope, **fields}

    @property
    def matrix_parameters(self) -> int:
        """Return the parameters of the layers' matrices: all but embeddings, head, biases and norms."""
        keys = self.hidden_size * self.num_key_value_heads // self.num_attention_heads
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * keys
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


MODELS = {
    "0.5B": Shape(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        micro_batch_tokens=16_384,
    ),
    "1.5B": Shape(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        micro_batch_tokens=8_192,
    ),
    # Four of the 28 layers of Qwen2.5-7B.
    "7B-slice": Shape(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=4,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        micro_batch_tokens=16_384,
    ),
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        micro_batch_tokens=192,
        vocab_size=512,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of a batch: ``prompts`` x ``group`` rows."""

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    """The mean."""
    sigma: float = 0.0
    """The deviation of the log-normal distribution; 0 if all are equal."""
    longest: int = 4096

    def responses(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows' lengths, [B]."""
        location = np.log(self.response_tokens) - self.sigma**2 / 2
        lengths = draw.lognormal(location, self.sigma, self.prompts * self.group)
        return lengths.round().clip(1, self.longest).astype(np.int64)


DATA = {
    "D1": Lengths(prompts=16, group=8, prompt_tokens=100, response_tokens=512),
    "D2": Lengths(prompts=16, group=8, prompt_tokens=100, response_tokens=512, sigma=0.8),
    "D3": Lengths(prompts=8, group=8, prompt_tokens=1024, response_tokens=512),
}
TINY_DATA = {
    "D1": Lengths(prompts=4, group=4, prompt_tokens=5, response_tokens=24),
    "D2": Lengths(prompts=4, group=4, prompt_tokens=5, response_tokens=24, sigma=0.8, longest=150),
    "D3": Lengths(prompts=2, group=4, prompt_tokens=40, response_tokens=20),
}


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one optimizer step. The rows of a prompt are neighbours."""

    group: int
    prompts: list[NDArray[np.int64]]
    """B arrays of token ids."""
    responses: list[NDArray[np.int64]]
    """B arrays of token ids."""
    advantages: NDArray[np.float32]
    """[B]: not whitened, since the loss would be nearly 0 otherwise."""
    old_logprobs: list[NDArray[np.float32]]
    """B arrays, one value for each response token. They differ from the model's, so ratios are not all 1."""

    @property
    def response_tokens(self) -> int:
        """Return the number of response tokens of all rows: the loss is the mean over them."""
        return sum(map(len, self.responses))

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each row, prompt and response, [B]."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def tokens(self) -> int:
        """Return the tokens of all rows, each with its own prompt."""
        return sum(self.lengths)


def rows_of(lengths: Lengths, vocabulary: int) -> Rows:
    """Return random rows, always the same."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, vocabulary, lengths.prompt_tokens) for _ in range(lengths.prompts)]
    counts = lengths.responses(draw)
    # About the logprob of random tokens under random weights.
    center = -np.log(vocabulary) - 0.2
    return Rows(
        group=lengths.group,
        prompts=[prompt for prompt in prompts for _ in range(lengths.group)],
        responses=[draw.integers(1, vocabulary, count) for count in counts],
        advantages=draw.normal(1.0, 0.5, len(counts)).astype(np.float32),
        old_logprobs=[draw.normal(center, 0.3, count).astype(np.float32) for count in counts],
    )


def flops(shape: Shape, rows: Rows, tokens: int) -> float:
    """Return the operations of forward and backward pass over ``tokens`` tokens, computed once.

    These are 6 for each parameter of the layers' matrices and token, 6 for each parameter of the head and response
    token, and those of causal attention of each row (12 by head size, heads and layer for each of half of all pairs).
    """
    matrices = 6 * shape.matrix_parameters * tokens
    head = 6 * shape.vocab_size * shape.hidden_size * rows.response_tokens
    pairs = sum(length**2 / 2 for length in rows.lengths)
    return float(matrices + head + 12 * shape.num_hidden_layers * shape.hidden_size * pairs)


def save_model(folder: Path, shape: Shape, device: str) -> None:
    """Write the model, in bfloat16, with a tokenizer. All systems load these weights."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<end>": 0, "a": 1}, unk_token="<end>")),
        eos_token="<end>",
        pad_token="<end>",
        padding_side="left",
    )
    config: Mapping[str, Any] = {**shape.config(), "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "shape.json").write_text(json.dumps(asdict(shape)))
