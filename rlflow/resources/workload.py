"""The workload of a step: tasks with sizes, the data between them and weight syncs, independent of the algorithm."""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.turns import ONE_TURN, TurnProfile
from rlflow.schema import Section

TaskKind = Literal["generate", "score", "update", "host"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A node of the graph as the planner sees it."""

    node: str
    role: str | None
    """None: the task runs on CPUs."""
    kind: TaskKind
    hosts_of: str | None = None
    """The role on whose hosts a task without a role runs, because its samples lie there; None: the controller's host.
    """
    after: tuple[str, ...] = ()
    """The nodes that it reads."""
    streams: bool = False
    """It can start with the first of its inputs."""
    samples: int
    steps: int = 1
    """The steps whose samples are generated at the same time: several where generation is ahead of training."""
    group_size: int = 1
    prompts: Lengths
    image_tokens: float = 0.0
    """The mean tokens of a prompt that stand for its images, which are encoded once for all rows of the prompt."""
    responses: Lengths
    longest: int
    """Tokens of the longest sequence that the recipe allows, or of the longest unit of several sequences."""
    unit_size: int = 1
    """Sequences that must be in one pass, because they are compared."""
    is_expected: bool = True
    """Sequences up to ``longest`` are expected. Otherwise only the model's positions bound the sequences of the
    data."""
    minibatches: int = 1
    """Optimizer steps, over all epochs."""
    epochs: int = 1
    """How often each sample is trained on."""
    turns: TurnProfile = ONE_TURN

    @cached_property
    def tokens(self) -> float:
        """Return the expected tokens of all samples."""
        return self.samples * (self.turns.segments * self.prompts.mean + self.responses.mean)

    @cached_property
    def computed_share(self) -> float:
        """Return the share of its tokens that a pass computes: rows of a prompt share its tokens."""
        shared = self.samples * self.prompts.mean * (1 - 1 / self.group_size)
        return 1 - shared / self.tokens

    @cached_property
    def typical_length(self) -> float:
        """Return the mean over tokens of the length of the sequence that a token is in."""
        lengths = [self.prompts.mean + length / self.turns.segments for length in self.responses.values]
        return sum(length * length for length in lengths) / sum(lengths)


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The output of a node or of the data. It is in the object store until its last reader has finished."""

    name: str
    """The name of the node or the source."""
    role: str | None
    """The role on whose hosts it lies; None: the controller's host."""
    bytes: float
    """Expected size, without columns that it passes on from another edge."""
    stored: float
    """The part of ``bytes`` in object stores; numbers for each sample stay with the controller."""
    routing: float = 0.0
    """The part of ``bytes`` that is the experts of tokens, which only the trained role reads that replays them."""
    readers: tuple[str, ...]
    """Nodes that need it, including those that read what other nodes pass on."""


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """A weight sync: after every step, a trained role sends its weights to a role that follows it."""

    source: str
    target: str

    @property
    def node(self) -> str:
        """Return the name under which the sync appears among the nodes."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, kw_only=True)
class Overlap(Section):
    """Generation of later steps, while a step trains or in turns with it."""

    hints_for_other_names: ClassVar[Mapping[str, str]] = {
        "staleness": "max_staleness",
        "max_off_policy_steps": "max_staleness",
        "async_level": "max_staleness",
        "partial_rollout": "in_flight: keep",
    }

    max_staleness: Annotated[int, Ge(0), Le(64)] = 0
    """The most steps by which the policy that sampled a token may be older than the policy that trains on it. With 0 a
    step generates its own samples before it trains."""
    in_flight: Literal["wait", "keep"] = "wait"
    """The treatment of unfinished samples when new weights are ready. ``wait``: they finish before the weights are
    loaded. ``keep``: they keep their tokens and continue with the new weights."""
    deterministic: bool = True
    """Let the number of a step decide which version generates it, whatever finishes first, so that a run is as
    reproducible as without overlap. Needs ``in_flight: wait``. False: newer versions generate as soon as they are
    ready."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """The tasks that run for later steps."""

    nodes: tuple[str, ...]
    overlap: Overlap
    """Its ``max_staleness`` is at least 1."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tasks, data and weight syncs of one step, and the tasks of an evaluation."""

    tasks: tuple[Task, ...]
    """In order: each task comes after the tasks that it reads."""
    weight_syncs: tuple[WeightSync, ...] = ()
    """One for each role that follows another."""
    edges: tuple[Edge, ...] = ()
    evaluation: tuple[Task, ...] = ()
    """The tasks of an evaluation on held-out rows, in order; none without evaluations."""
    ahead: Ahead | None = None
    """None: every task runs in its own step."""

    def takes_turns(self, gpus_of: Mapping[str, Collection[Hashable]]) -> bool:
        """Return whether a role that runs ahead of its step shares GPUs with one that does not, given those of each."""
        ahead = self.ahead.nodes if self.ahead else ()
        early = {task.role for task in self.tasks if task.node in ahead}
        own, other = (
            {gpu for role, gpus in gpus_of.items() if (role in early) == is_early for gpu in gpus}
            for is_early in (True, False)
        )
        return not own.isdisjoint(other)

    def of(self, role: str) -> tuple[Task, ...]:
        """Return the tasks of a role."""
        return tuple(task for task in self.tasks if task.role == role)

    def on_gpus_of(self, role: str, roles: Collection[str]) -> tuple[Task, ...]:
        """Return the tasks of a role that shares its GPUs with ``roles``, with the steps that it generates at once."""
        return tuple(self.at_once(task, roles) for task in self.of(role))

    def at_once(self, task: Task, roles: Collection[str]) -> Task:
        """Return a task, on the GPUs of ``roles``, with the steps that it generates at once.

        With ``in_flight: wait`` these are several only where a turn of generation has several steps.
        """
        ahead = self.ahead
        if ahead is None or task.kind != "generate" or task.node not in ahead.nodes:
            return task
        if ahead.overlap.in_flight == "keep" or self.takes_turns(dict.fromkeys(roles, (0,))):
            return replace(task, steps=ahead.overlap.max_staleness + 1)
        return task

    def bytes_made_by(self, role: str) -> float:
        """Return the bytes that a role's nodes put into object stores in a step."""
        return sum(edge.stored for edge in self.edges if edge.role == role)

    def bytes_read_by(self, role: str) -> float:
        """Return the bytes that a role's nodes read from object stores in a step, each edge counted once."""
        nodes = {task.node for task in self.of(role)}
        return sum(edge.stored for edge in self.edges if nodes.intersection(edge.readers))

    @property
    def generated_tokens(self) -> float:
        """Return the tokens of prompts and responses in a step, or those of the data where nothing is generated."""
        generating = [task for task in self.tasks if task.kind == "generate"]
        return max((task.tokens for task in generating or self.tasks), default=0.0)
