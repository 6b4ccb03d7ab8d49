"""The capabilities of engines, and everything that an engine is built from.

A capability is a protocol, and an engine has the capabilities whose methods its class defines. A node asks for one of
them by the type of its ``engine`` parameter. The runtime uses the protocols that no node asks for: how an engine
takes over weights, resumes rollouts, and shares a GPU with other roles.

Shapes: T response tokens of a micro-batch.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import (
    Logprobs,
    Metrics,
    Minibatch,
    Prompts,
    Rewards,
    Rollouts,
    Sequences,
    TopLogprobs,
    ValueEstimates,
)
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Attention, Auto, Layout
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.lora import Lora
from rlflow.resources.models.vision import Part, TrainedParts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The parameters by which responses are sampled."""

    max_tokens: int
    group_size: int = 1
    temperature: float = 1.0
    """The sampling temperature; 0 decodes greedily."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own end tokens."""
    turns: "Turns | None" = field(default=None, hash=False)
    """Responses are conversations, whose turns are generated one by one; None for responses in one piece."""

    @property
    def scoring_temperature(self) -> float:
        """Return the temperature of the logprobs: 1 under greedy decoding."""
        return self.temperature or 1.0

    def longest_sequence(self, prompt_tokens: int) -> int:
        """Return the most tokens of a prompt, which has at most ``prompt_tokens``, with its response."""
        includes_prompt = self.turns is not None and self.turns.limit_includes_prompt
        return self.max_tokens if includes_prompt else prompt_tokens + self.max_tokens


class Turns(Protocol):
    """The turns of conversations, in which something answers a model. An engine knows nothing else of them."""

    @property
    def limit_includes_prompt(self) -> bool:
        """Return whether ``Sampling.max_tokens`` limits a prompt with its response, not the response alone."""

    def generate(self, engine: "Generates", prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return conversations whose turns ``engine`` generates, one batch of turns after another.

        The engine has a ``tokenizer``.
        """

    def session_engine(self, engine: Any) -> Any:
        """Return a SessionEngine whose responses are conversations, and whose turns the SessionEngine ``engine`` makes.

        The engine has a ``tokenizer``.
        """


Entropy = Literal["unused", "reported", "trained"]
"""The use of the entropies of the model's distributions in a loss: they take time, and their gradients more."""


class TokenLoss(Protocol):
    """A loss per response token, as a function of the model's outputs and the columns of a minibatch.

    The outputs are logprobs, or what a value or reward head gives for each token.
    """

    @property
    def temperature(self) -> float:
        """Return the number by which the logits are divided."""

    @property
    def entropy(self) -> Entropy:
        """Return the use of the column of entropies, which is zero where it is unused."""

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]", /) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss [T], and metrics [T], which are averaged with the weights of the loss.

        A metric is NaN for a token that has none. Besides the minibatch's columns there are ``rows``, int64: the number
        of each token's response, whose tokens are neighbours; and from engines with logprobs ``entropy``: the
        entropy of the model's distribution, in nats. A column of ``TopLogprobs`` is [T, K], its logprobs, and
        ``word_logprobs`` [T, K] are the model's own of the same words.
        """


@runtime_checkable
class Generates(Protocol):
    """The capability to sample responses."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return ``group_size`` rollouts of each prompt, in the order of keys."""


@runtime_checkable
class Scores(Protocol):
    """The capability to compute logprobs."""

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        """Return the logprob of every response token under this model."""


@runtime_checkable
class ScoresBase(Protocol):
    """The capability to compute logprobs of the model as it was before its adapters were trained."""

    def base_logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        """Return the logprob of every response token under this model without its adapters."""


@runtime_checkable
class ScoresTop(Protocol):
    """The capability to tell a model's likeliest words."""

    def top_logprobs(self, sequences: Sequences, temperature: float, count: int) -> TopLogprobs:
        """Return the ``count`` likeliest words in the place of every response token; all, if there are fewer."""


@runtime_checkable
class Values(Protocol):
    """The capability to estimate values."""

    def values(self, sequences: Sequences) -> ValueEstimates:
        """Return the return that is expected before each response token."""


@runtime_checkable
class Evaluates(Protocol):
    """The capability to score whole responses, as a reward model does."""

    def evaluate(self, sequences: Sequences) -> Rewards:
        """Return one number for each response, independent of the other responses in the batch."""


@runtime_checkable
class Trains(Protocol):
    """The capability to train a model, save it, and hand its weights to engines that follow it."""

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        """Take one optimizer step. The loss is the sum over tokens of their weight times their loss."""

    def save(self, folder: Path) -> None:
        """Write everything that a resumed training needs."""

    def restore(self, folder: Path) -> None:
        """Load what ``save`` wrote."""

    def export(self, folder: Path) -> None:
        """Write the model and its tokenizer in the form that ``from_pretrained`` reads."""

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield the name and value of each weight that a sync transfers; one is valid until the next is requested.

        Of a large weight come experts, each under its name in the model's files, or some rows at a time
        (``buckets.join_parts``). Every rank iterates over all of them. Rank 0 gets the full values, other ranks may get
        anything.
        """


class TrainsLogprobs(Trains, Scores, Protocol):
    """Trains a language model, and scores with it."""


class TrainsValues(Trains, Values, Protocol):
    """Trains a value model, and estimates values with it."""


class TrainsReward(Trains, Evaluates, Protocol):
    """Trains a reward model, and evaluates with it."""


@runtime_checkable
class Follows(Protocol):
    """An engine that can take over weights from a trained role; the runtime uses it for a role that ``follows`` one."""

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Replace the weights, and mark all tokens generated from now on with ``version``.

        A tensor stays valid until the call returns. After a failed weight sync the engine refuses to generate until
        another one succeeds. Raises EngineError.
        """


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can release its GPU memory while other roles on its GPUs work."""

    def sleep(self, discard_weights: bool = False) -> None:
        """Move weights and state to host memory, and release the memory that torch caches.

        With ``discard_weights`` an engine that follows a trained role drops its weights: a sync replaces them before
        it works again.
        """

    def wake(self, weights_only: bool = False) -> None:
        """Move weights and state back to the GPU. Does nothing for an engine that is awake.

        With ``weights_only`` only the weights are on the GPU afterwards, which is enough to copy them from or to this
        engine; any other work needs a full wake first.
        """


CAPABILITIES: dict[str, type] = {
    protocol.__name__: protocol
    for protocol in (Generates, Scores, ScoresBase, ScoresTop, Values, Evaluates, Trains, Follows)
}

Head = Literal["vocabulary", "value", "reward"]
_HEADS: Mapping[str, Head] = {"Scores": "vocabulary", "Values": "value", "Evaluates": "reward"}
"""The output head that a capability needs. A model has one head; other capabilities work with any."""


def choose_head(capabilities: Collection[str]) -> Head:
    """Return the output head that a model with these capabilities needs."""
    return next((head for capability, head in _HEADS.items() if capability in capabilities), "vocabulary")


WeightTransport = Literal["object_store", "ipc", "nccl"]
"""A way for weights to reach a role that follows a trained one: in buckets through the hosts' object stores, or from
GPU to GPU, between processes on the same GPU (CUDA IPC) or on different GPUs (NCCL)."""
GpuTransport = Literal["ipc", "nccl"]
"""The weight transports that go straight from GPU to GPU."""
ALL_TRANSPORTS: frozenset[WeightTransport] = frozenset({"object_store", "ipc", "nccl"})


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that an engine is built from."""

    role: str
    model_name: str
    """The model's name in the recipe, for error messages."""
    model: Model
    capabilities: frozenset[str]
    """The capabilities that the graph asks of this role."""
    device: str
    """The device, in torch's notation."""
    seed: int
    steps: int
    """The number of steps in which the role is trained, for the learning rate schedule."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None
    """Adapters beside the model's weights: trained here, or copied from the role that this one follows."""
    train: TrainedParts = "language"
    """The parts of a vision-language model that are trained."""
    synced_parts: tuple[Part, ...] = get_args(Part)
    """The parts of a vision-language model that weight syncs transfer."""
    routing_replay: bool = False
    """A role that generates records the experts of its tokens, and a role that is trained uses the recorded ones."""
    layout: Layout
    rank: int = 0
    """The rank of this worker in its role. Ranks that share sequences (sequence parallelism) are neighbours."""
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    """HOST:PORT on which rank 0 listens for the role's other workers, or an engine for its processes on other hosts."""
    host_rank: int = 0
    """The number of this host among those of the engine."""
    max_model_len: int | None = None
    """The most tokens of a prompt and its response together; None for a role that generates nothing."""
    max_num_seqs: int = 256
    """The most responses that one worker generates at the same time."""
    gpu_transport: GpuTransport | None = None
    """The GPU-to-GPU transport by which weights reach this worker; None if they come through ``load_weights``."""
    attention: Attention | Auto = "auto"
    deterministic: bool = False
    timeout_minutes: float = 10.0
    """The time after which a collective between the role's ranks fails."""
    journal: Path | None = None
    """The folder of the run's journal, in which finished responses are recorded; None to record nothing."""


LOGITS_AT_ONCE = 2**27
"""The most logits that exist at a time on a GPU: ``causal_lm/output_layer.py`` computes them in tiles."""
TrainingMemories = Mapping[Literal["float32", "bfloat16"], TrainingMemory]
"""How weights, gradients and optimizer are kept, by the model's dtype."""
TORCH_TRAINING: TrainingMemories = {
    "float32": TrainingMemory(
        weights=4, gradients=4, optimizer=8, keeps_gradients=False, logits=8, logits_at_once=LOGITS_AT_ONCE
    ),
    "bfloat16": TrainingMemory(gradients=4, keeps_gradients=False, logits=4, logits_at_once=LOGITS_AT_ONCE),
}
"""AdamW on float32 weights, or on float32 masters of others; gradients are float32, and freed after every step. Of a
logit there are its value and its gradient."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine's class and its declarations: the ``ENGINE`` of its file. Reading it imports no model library."""

    engine: type[Any]
    """The class, which is built from an ``EngineSpec``."""
    parallel: frozenset[str] = frozenset()
    """The ways to spread it over GPUs that it supports: tensor, pipeline, data, sequence, expert, and replicas of
    what data- and sequence-parallel ranks shard."""
    package: str | None = None
    """The extra that installs its library. An engine that has one runs in a process of its own."""
    check_package: Callable[[], None] = lambda: None
    """Raises the library's error if its installation does not work although it can be imported."""
    routing_replay: bool = False
    """It records the experts of the tokens that it generates, or uses recorded ones where it trains."""
    trains_vision: bool = False
    """It can train the parts of a model that read images, too."""
    optimizers: frozenset[str] = frozenset({"adamw"})
    """The kinds of optimizers that it has."""
    concurrent: bool = False
    """True for a ``SessionEngine``: it batches the samples of several callers, and generates while it receives more."""
    training_memory: TrainingMemories = field(
        default_factory=lambda: {"float32": TrainingMemory(weights=4), "bfloat16": TrainingMemory()}
    )
    """The bytes per parameter of a model that it trains or scores with, for the planner."""
    sends_weights_by: frozenset[WeightTransport] = frozenset()
    """The transports by which its trained weights can leave it; empty if it does not train."""
    receives_weights_by: frozenset[WeightTransport] = frozenset()
    """The transports by which it can take over weights; empty if it cannot follow a trained role."""

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities that the class has."""
        return capabilities_of(self.engine)


def capabilities_of(engine: type[Any]) -> frozenset[str]:
    """Return the names of the capabilities that an engine's class has, or that a protocol asks for."""
    return frozenset(name for name, protocol in CAPABILITIES.items() if issubclass(engine, protocol))


def sample_seed(seed: int, key: NDArray[np.int64]) -> int:
    """Return a sample's seed: a hash of the run's seed and the sample's key, the same on every engine."""
    text = ",".join(str(int(part)) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
