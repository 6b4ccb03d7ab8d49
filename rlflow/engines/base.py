"""The capabilities: what a node may ask of the model in its role.

A capability is a protocol. An engine is a class that meets some of them; nothing else declares what it can do.
Tensors of losses have shape [T], the response tokens of a micro-batch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Metrics, Minibatch, Prompts, Rewards, Rollouts, Sequences, ValueEstimates
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Attention, Auto, Layout
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_tokens: int
    group_size: int = 1
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """A response ends with any of these, as with the model's own end tokens."""

    @property
    def scoring_temperature(self) -> float:
        """That of the logprobs: 1 where the likeliest token is taken."""
        return self.temperature or 1.0


class TokenLoss(Protocol):
    """What training minimises: a loss a response token, from the model's logprobs, or what its head says in place of
    them, and the minibatch's columns."""

    @property
    def temperature(self) -> float:
        """The logits are divided by it."""

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]", /) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The loss [T], and metrics [T], whose means have the weights of the loss; NaN where a token has no metric.

        Besides the minibatch's columns there is ``rows``, int64: the number of each token's response, all of whose
        tokens that count are there, in a row; and from an engine that has logprobs ``entropy``: of the model, in nats.
        Gradients flow through it as through ``logprobs``.
        """


@runtime_checkable
class Generates(Protocol):
    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """``group_size`` rollouts of each prompt, in the order of keys."""


@runtime_checkable
class Scores(Protocol):
    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        """Of every response token under this model."""


@runtime_checkable
class ScoresBase(Protocol):
    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        """Of every response token under this model without its adapters: as it was before it was trained."""


@runtime_checkable
class Values(Protocol):
    def values(self, sequences: Sequences) -> ValueEstimates:
        """The return expected before each response token."""


@runtime_checkable
class Evaluates(Protocol):
    def evaluate(self, sequences: Sequences) -> Rewards:
        """A number for each response, whatever others there are."""


@runtime_checkable
class Trains(Protocol):
    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """One optimizer step. The loss is the sum over tokens of their weight times their loss."""

    def save(self, folder: Path) -> None:
        """All that training goes on from."""

    def restore(self, folder: Path) -> None:
        """From what ``save`` wrote."""

    def export(self, folder: Path) -> None:
        """The model and its tokenizer, for ``from_pretrained``."""

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        """Name and value of each weight that is trained, in turn: a tensor is good until the next is asked for.

        Every rank goes through all of it; the values are those of the whole weights on rank 0 and may be elsewhere.
        """


class TrainsLogprobs(Trains, Scores, Protocol):
    """Trains the model that it scores with."""


class TrainsValues(Trains, Values, Protocol):
    """Trains the model that it values with."""


class TrainsReward(Trains, Evaluates, Protocol):
    """Trains the model that it evaluates with."""


@runtime_checkable
class Follows(Protocol):
    """Not asked by nodes: an engine whose role ``follows`` a trained one."""

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Takes the weights over and writes ``version`` on what it generates from now on.

        A tensor is good until the call returns. After a copy that failed the engine generates nothing until another has
        gone through. Raises EngineError.
        """


@runtime_checkable
class Continues(Protocol):
    """Not asked by nodes: an engine that need not write all of a response at once."""

    def write_on(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None, enough: int) -> Rollouts:
        """``begun`` as far as it is, and what is written until so many prompts have all of their rollouts.

        Rows are in the order of keys, as those given must be. A row that is neither finished nor ``max_tokens`` long
        was broken off, and of a sample that is not begun there is none. New tokens have the version of the weights
        that wrote them.
        """


@runtime_checkable
class Sleeps(Protocol):
    """Not asked by nodes: an engine that gives its GPU memory up while other roles on its GPUs work."""

    def sleep(self, discard_weights: bool = False) -> None:
        """Move weights and state to the host's memory and release what torch caches.

        With ``discard_weights`` the weights of an engine that follows a trained role are lost: a copy replaces them
        before it works again.
        """

    def wake(self, weights_only: bool = False) -> None:
        """Bring weights and state back to where they were.

        With ``weights_only`` nothing but the weights is on the GPU afterwards, to take weights over or to hand them on:
        before other work, a full wake must follow. Either may be asked for of an engine that is awake already.
        """


@runtime_checkable
class SharesGpus(Protocol):
    """Not asked by nodes: an engine that stays awake while other roles on its GPUs work."""

    def release_memory(self) -> None:
        """Give back to the driver the GPU memory that torch caches, for other processes on the GPU."""


CAPABILITIES: dict[str, type] = {
    protocol.__name__: protocol
    for protocol in (Generates, Scores, ScoresBase, Values, Evaluates, Trains, Follows, Continues)
}


Head = Literal["vocabulary", "value", "reward"]
HEADS: Mapping[str, Head] = {"Scores": "vocabulary", "Values": "value", "Evaluates": "reward"}
"""What a model needs for a capability; it has one. For those that are not here, any."""

WeightBackend = Literal["ipc", "nccl"]
"""From GPU to GPU: between processes on the same one, or from one to others."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """All that an engine is built from."""

    role: str
    model_name: str
    """The model's name in the recipe, for messages."""
    model: Model
    capabilities: frozenset[str]
    """Those that the graph asks of this role."""
    device: str
    """As torch names it."""
    seed: int
    steps: int
    """In which the role is trained, for the learning rate's schedule."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None
    """Adapters beside the model's weights: to be trained, or taken over from the role that this one follows."""
    layout: Layout
    rank: int = 0
    """Of this worker among those of its role; sequence-parallel ranks of one share of the data are neighbours."""
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    """HOST:PORT of rank 0, where the workers of the role meet."""
    max_model_len: int | None = None
    """Tokens of the longest prompt and response together; None where the role generates nothing."""
    max_num_seqs: int = 256
    """Responses that one worker writes at once."""
    weight_backend: WeightBackend | None = None
    """How weights come to it, where not through ``load_weights``."""
    attention: Attention | Auto = "auto"
    deterministic: bool = False
    timeout_minutes: float = 10.0
    """Until an exchange between ranks of the role is given up."""


LOGITS_AT_ONCE = 2**24
"""The most logits that exist at a time on a GPU: ``causal_lm/output_layer.py`` computes them in chunks."""
FP32_TRAINING = TrainingMemory(
    weights=4, gradients=4, optimizer=8, keeps_gradients=False, logits_at_once=LOGITS_AT_ONCE
)
"""AdamW on float32 weights, whose gradients are freed after every step."""


class Engine(Protocol):
    """An engine of any library."""

    parallel: ClassVar[frozenset[str]]
    """The ways in which it can be spread over GPUs: tensor, pipeline, data, sequence."""
    package: ClassVar[str | None]
    """What it needs besides rlflow's own dependencies; it runs in a process of its own then."""
    concurrent: ClassVar[bool]
    """Its ``generate`` may be called from several threads at once, and works on all of it together."""
    training_memory: ClassVar[TrainingMemory | None]
    """How it keeps weights, gradients and optimizer of a model that it trains or scores with, for the planner. None for
    an engine that only generates."""

    def __init__(self, spec: EngineSpec) -> None: ...


def capabilities_of(engine: type[Any]) -> frozenset[str]:
    """The names of the capabilities that a class meets, or a protocol asks."""
    return frozenset(name for name, protocol in CAPABILITIES.items() if issubclass(engine, protocol))


def sample_seed(seed: int, key: NDArray[np.int64]) -> int:
    """Of one sample: a hash of the run's seed and the sample's key, the same wherever and whenever it is drawn."""
    text = ",".join(str(int(part)) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
