"""What one step asks of the roles: tasks with numbers, whatever the algorithm."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rlflow.resources.time.lengths import Lengths

TaskKind = Literal["generate", "score", "update", "host"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A node of the graph as the planner sees it."""

    node: str
    role: str | None
    """None: on the controller's processor."""
    kind: TaskKind
    after: tuple[str, ...] = ()
    """The nodes whose output it reads."""
    streams: bool = False
    """It can begin with parts of what it reads."""
    samples: int
    group_size: int = 1
    prompts: Lengths
    responses: Lengths
    longest: int
    """Tokens of the longest sequence that the recipe allows; of all that go together, where several do."""
    unit_size: int = 1
    """Sequences that one pass must have, since they are compared."""
    is_expected: bool = True
    """Whether such a sequence is: else nothing but the model's positions bounds those of the data."""
    minibatches: int = 1
    """Optimizer steps, all epochs together."""
    epochs: int = 1
    """How often each sample is trained on."""
    turns: int = 1
    """In which a response is written."""

    @cached_property
    def tokens(self) -> float:
        return self.samples * (self.prompts.mean + self.responses.mean)

    @cached_property
    def parts(self) -> tuple[tuple[Lengths, Lengths], ...]:
        """Of each turn what is read before it, all that is there so far, and what is written in it: equal shares."""
        if self.turns == 1:
            return ((self.prompts, self.responses),)
        share = self.responses.mean / self.turns
        written = Lengths(tuple(max(1.0, length / self.turns) for length in self.responses.values))
        return tuple(
            (Lengths(tuple(length + turn * share for length in self.prompts.values)), written)
            for turn in range(self.turns)
        )

    @cached_property
    def typical_length(self) -> float:
        """Of the sequence that a token is in: the mean over tokens."""
        whole = [self.prompts.mean + length for length in self.responses.values]
        return sum(length * length for length in whole) / sum(whole)


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What a node, or the data, gives to the nodes that read it. It is in the store until the last of them is done."""

    name: str
    """The node's, or the source's."""
    role: str | None
    """Whose workers hold it; None: a process beside the controller."""
    bytes: float
    """Expected, of its own: what it hands on of another edge is counted there."""
    stored: float
    """Of them, in the hosts' stores: numbers a sample are with the controller."""
    readers: tuple[str, ...]
    """Nodes that need it, with those that read what hands it on."""


@dataclass(frozen=True, kw_only=True)
class WeightCopy:
    """After every step, from a trained role to one that follows it."""

    source: str
    target: str

    @property
    def node(self) -> str:
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    tasks: tuple[Task, ...]
    """Each behind those it reads."""
    copies: tuple[WeightCopy, ...] = ()
    edges: tuple[Edge, ...] = ()

    def of(self, role: str) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.role == role)

    def bytes_made_by(self, role: str) -> float:
        """In a step, of what is stored."""
        return sum(edge.stored for edge in self.edges if edge.role == role)

    def bytes_read_by(self, role: str) -> float:
        """Likewise, an edge once, however many of the role's nodes read it."""
        nodes = {task.node for task in self.of(role)}
        return sum(edge.stored for edge in self.edges if nodes.intersection(edge.readers))

    @property
    def generated_tokens(self) -> float:
        """Prompts and responses of a step, each sample once; of the data where nothing is generated."""
        generating = [task for task in self.tasks if task.kind == "generate"]
        return max((task.tokens for task in generating or self.tasks), default=0.0)
