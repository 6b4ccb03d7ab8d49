"""The base of all nodes: functions with options, which declare everything that others must know about them.

A node is a frozen dataclass. Its fields are the options of a recipe, the parameters of ``run`` are the inputs (one with
a default is optional), and the return type is the output. Keyword-only parameters are not inputs: a subclass may pass
them to the ``run`` that it overrides. The runtime itself passes two further parameters:

- ``engine`` asks the node's role for the capability that the annotation names;
- ``state`` holds what the node remembers from step to step: a ``State``, saved in checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal

from rlflow.batch import Batch, Selection
from rlflow.engines.base import Sampling, capabilities_of
from rlflow.errors import GraphError
from rlflow.nodes.alarms import Alarm
from rlflow.nodes.signature import Input, read_signature
from rlflow.recipe import Recipe
from rlflow.schema import Section

Unit = Literal["sample", "group", "batch"]
_FROM_RUNTIME = ("engine", "state")

KINDS: dict[str, type["Node"]] = {}
"""The nodes that a recipe may name by kind."""


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A node's output as an expression of its inputs, for people.

    Symbols: p is the probability of a response token under the trained model, r a reward, A an advantage.
    """

    symbol: str
    """The name of the output in other formulas."""
    expression: str
    where: Mapping[str, str] = field(default_factory=dict)
    """Expressions of further symbols in it."""


@dataclass(frozen=True)
class Headline:
    """A metric of a node that says in one number how a step went."""

    metric: str
    """Its name below the node's: ``mean`` for ``rewards/mean``."""
    format: str
    """Its number of digits, as in ``.3f``."""
    label: str = ""
    """The word beside the number; by default the node's name."""
    is_learned: bool = False
    """True if it shows how much has been learned, so that it is drawn over the whole run."""


@dataclass
class State:
    """The memory of a node from step to step. Derive a dataclass from it, with values that JSON can hold.

    Each field is a file of the checkpoint, ``graph.NODE/FIELD.json``, and each number a metric, ``NODE/FIELD``.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves, by name, as values that JSON can hold."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned when the checkpoint was written."""
        for item in fields(self):
            setattr(self, item.name, saved[item.name])

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers to report for a step: those with which the step begins."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


@dataclass(frozen=True, kw_only=True)
class Node(Section):
    """The base of all nodes. A kind of node names its kind and its unit as arguments of the class."""

    kind: ClassVar[str]
    """The name under which recipes ask for the node."""
    unit: ClassVar[Unit]
    """How much the node needs at once: one sample, the samples of a prompt, or all of a step."""
    compares_groups: ClassVar[bool]
    """True if the node compares the responses to a prompt and refuses groups of one, as with ``unit="group"``."""
    reads_tokens: ClassVar[bool]
    """True if the node reads tokens, logprobs, texts or rows, and not only keys, lengths and one number a sample.
    Without a role, such a node runs where tokens are: on every host, on the samples that lie there. A node with a state
    or with ``unit="batch"`` runs in one place. ``unit="sample"`` implies it."""
    required_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The options with their values, for each input, that the node connected to this input must have."""
    other_responses: ClassVar[frozenset[str]] = frozenset()
    """The inputs that belong to other responses than ``rollouts`` and the rest, such as those of a greedy baseline."""
    headline: ClassVar[Headline | None] = None
    """The metric that the progress of a run shows for the node."""
    alarms: ClassVar[tuple[Alarm, ...]] = ()
    """The metrics that a run warns about if they stay beyond their bounds."""

    def __init_subclass__(
        cls,
        *,
        kind: str,
        unit: Unit,
        compares_groups: bool | None = None,
        reads_tokens: bool | None = None,
        is_in_recipes: bool = True,
    ) -> None:
        names = {f"{kind_class.__module__}.{kind_class.__qualname__}" for kind_class in (cls, KINDS.get(kind, cls))}
        if len(names) > 1:
            raise TypeError(f"'{kind}' is the kind of two classes: {' and '.join(sorted(names))}")
        cls.kind = kind
        cls.unit = unit
        cls.compares_groups = unit == "group" if compares_groups is None else compares_groups
        cls.reads_tokens = unit == "sample" if reads_tokens is None else reads_tokens
        if is_in_recipes:
            KINDS[kind] = cls

    @classmethod
    def inputs(cls) -> tuple[Input, ...]:
        """Return the inputs in the order of ``run``'s parameters, without those that the runtime passes."""
        return tuple(parameter for parameter in cls._signature()[0] if parameter.name not in _FROM_RUNTIME)

    @classmethod
    def from_runtime(cls) -> Mapping[str, type]:
        """Return the types of the parameters that the runtime passes to ``run``: engine and state."""
        return {parameter.name: parameter.type for parameter in cls._signature()[0] if parameter.name in _FROM_RUNTIME}

    @classmethod
    def capability(cls) -> type | None:
        """Return the capability that the node asks of its role's engine; None for a node without a role."""
        return cls.from_runtime().get("engine")

    @classmethod
    def output(cls) -> type:
        """Return the type of the output."""
        return cls._signature()[1]

    @classmethod
    @cache  # because planning asks for signatures often
    def _signature(cls) -> tuple[tuple[Input, ...], type]:
        """Return the inputs and the output of ``run``. Raises GraphError, its path counted from the node."""
        try:
            return read_signature(cls)
        except (AttributeError, KeyError, NameError, TypeError) as error:
            fact = f"'{cls.kind}': the types of run cannot be read ({error!r})"
            raise GraphError("node", fact, fix="annotate all of it") from None

    def check(self, connected: frozenset[str]) -> None:
        """Raise a UserError, its path counted from the node, for options that do not go with the inputs connected."""

    def check_graph(self, view: "NodeView") -> None:
        """Raise a UserError, its path counted from the recipe, for a node that does not go with the graph around it."""

    def replacements(self, view: "NodeView") -> Mapping[str, "GraphNode"]:
        """Return nodes that take the place of others in the graph, by name, because they do less for the same result.

        Nodes that are not in recipes (``is_in_recipes=False``) come into a graph in this way.
        """
        return {}

    def check_host(self) -> None:
        """Raise a UserError or an EngineError where the node cannot run on this host, before anything starts."""

    def check_rows(self, rows: Sequence[Mapping[str, Any]], where: str) -> Iterable[str]:
        """Raise a RecipeError, its path counted from the node, for rows that it cannot read; return warnings."""
        return ()

    def cautions(self, view: "NodeView") -> Iterable[str]:
        """Return a line ``OPTION: REASON`` for each option that is legal and yet probably not what is wanted."""
        return ()

    def formula(self, symbols: Mapping[str, str]) -> Formula | None:
        """Return the output as a formula for people, or None. ``symbols`` names the inputs that are connected."""
        return None

    @property
    def warmup_steps(self) -> int:
        """Return the number of first steps in which the node does not train its role yet."""
        return 0

    @property
    def sampling(self) -> Sampling | None:
        """Return what a node that generates asks of its engine; None for every other node."""
        return None

    @property
    def sample_share(self) -> float:
        """Return the share of the samples that it reads on which the node works; 0 for a node without any work."""
        return 1.0

    @property
    def num_turns(self) -> int:
        """Return the largest number of turns in which a response is generated."""
        return 1

    @property
    def can_stream(self) -> bool:
        """Return whether consumers may start with single responses, because the engine's output is the node's own."""
        return False

    def new_state(self) -> State | None:
        """Return the state at the start of a run; None without one. By default a state needs no arguments."""
        kind = self.from_runtime().get("state")
        return None if kind is None else kind()


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """A node of the graph, with its role and its inputs."""

    name: str
    operation: Node
    role: str | None
    inputs: Mapping[str, str]
    """For each connected parameter of ``run``, the node or source that it reads."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities that the node asks of its role's engine."""
        capability = self.operation.capability()
        return capabilities_of(capability) if capability else frozenset()

    @property
    def works_on_parts(self) -> bool:
        """Return whether the node can process what it reads in parts: single samples, or complete groups.

        A node with a role is called once, because a model's numbers depend on the batch. So is a node with a state,
        which changes with every call, and one whose output has a number for the whole batch.
        """
        operation = self.operation
        if operation.unit == "batch" or self.role is not None or not self.inputs:
            return False
        output = operation.output()
        return operation.new_state() is None and issubclass(output, Batch) and not output.has_batch_numbers()

    @property
    def runs_on_every_host(self) -> bool:
        """Return whether the node runs on every host, on the samples that lie there.

        It reads tokens, and works on parts: a node with a state or one for the whole step runs in one place.
        """
        return self.works_on_parts and self.operation.reads_tokens

    @property
    def selects_prompts(self) -> bool:
        """Return whether the node selects the prompts that a step trains on."""
        return issubclass(self.operation.output(), Selection)


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node with the graph and the recipe around it, for checks and cautions."""

    node: GraphNode
    nodes: Mapping[str, GraphNode]
    """All nodes by name."""
    recipe: Recipe

    @property
    def path(self) -> str:
        """Return the path of the node in the recipe."""
        return f"graph.{self.node.name}"

    @property
    def engine(self) -> str | None:
        """Return the engine of the node's role."""
        return self.recipe.roles[self.node.role].engine if self.node.role else None

    @property
    def dtype(self) -> str | None:
        """Return the number type of its role's model."""
        return self.recipe.models[self.recipe.roles[self.node.role].model].dtype if self.node.role else None

    def origin(self, name: str) -> GraphNode | None:
        """Return the node that an input reads; None for data, and for an input that is not connected."""
        return self.nodes.get(self.node.inputs.get(name, ""))

    def generators(self, name: str = "rollouts") -> Iterator[GraphNode]:
        """Yield the nodes that generate the rollouts of an input, which other nodes may only select."""
        origin = self.origin(name)
        if origin is not None and origin.operation.sampling:
            yield origin
        elif origin is not None:
            yield from replace(self, node=origin).generators()

    @property
    def trained_roles(self) -> list[str]:
        """Return the roles that some node trains, in the order of the nodes."""
        trained = (node.role for node in self.nodes.values() if node.role and "Trains" in node.capabilities)
        return list(dict.fromkeys(trained))

    @property
    def samplers(self) -> tuple[str, ...]:
        """Return the engines that generate the responses which the node reads directly."""
        read = (node for node in self.nodes.values() if node.name in self.node.inputs.values())
        return tuple(self.recipe.roles[node.role].engine for node in read if node.role and node.operation.sampling)
