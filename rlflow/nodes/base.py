"""The base of all nodes: functions with options, which declare everything that others must know about them.

A node is a frozen dataclass. Its fields are the options of a recipe, the parameters of ``run`` are the inputs (one with
a default is optional), and the return type is the output. Keyword-only parameters are not inputs: a subclass may pass
them to the ``run`` that it overrides. The runtime itself passes two further parameters:

- ``engine`` asks the node's role for the capability that the annotation names;
- ``state`` holds what the node remembers from step to step: a ``State``, saved in checkpoints.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from rlflow.errors import GraphError
from rlflow.schema import Section

Unit = Literal["sample", "group", "batch"]
_FROM_RUNTIME = ("engine", "state")

KINDS: dict[str, type["Node"]] = {}
"""The nodes that a recipe may name by kind."""


@dataclass(frozen=True)
class Input:
    """An input of a node: a parameter of its ``run``."""

    name: str
    type: type
    required: bool


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


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """The facts about the surrounding graph that a node may use when it warns about its options."""

    connected: frozenset[str]
    """The node's inputs that are connected."""
    role: str | None
    engine: str | None
    """The engine of the node's role."""
    dtype: str | None
    """The number type of its role's model."""
    samplers: tuple[str, ...]
    """The engines that generate the responses which the node reads."""
    max_staleness: int = 0
    """The most versions by which these engines' weights are older than the trained ones."""


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
        for each in fields(self):
            setattr(self, each.name, saved[each.name])

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
    """True if the node compares the responses to a prompt, so that groups of one are refused. ``unit="group"``
    implies it."""
    reads_tokens: ClassVar[bool]
    """True if the node reads tokens, logprobs, texts or rows, and not only keys, lengths and one number a sample.
    Without a role, such a node runs where tokens are: on every host, on the samples that lie there. A node with a state
    or with ``unit="batch"`` runs in one place. ``unit="sample"`` implies it."""
    required_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The options with their values, for each input, that the node connected to this input must have."""
    other_responses: ClassVar[frozenset[str]] = frozenset()
    """The inputs that belong to other responses than ``rollouts`` and the rest, such as those of a greedy baseline."""

    def __init_subclass__(
        cls, *, kind: str, unit: Unit, compares_groups: bool | None = None, reads_tokens: bool | None = None
    ) -> None:
        names = {f"{each.__module__}.{each.__qualname__}" for each in (cls, KINDS.get(kind, cls))}
        if len(names) > 1:
            raise TypeError(f"'{kind}' is the kind of two classes: {' and '.join(sorted(names))}")
        cls.kind = kind
        cls.unit = unit
        cls.compares_groups = unit == "group" if compares_groups is None else compares_groups
        cls.reads_tokens = unit == "sample" if reads_tokens is None else reads_tokens
        KINDS[kind] = cls

    @classmethod
    def inputs(cls) -> tuple[Input, ...]:
        """Return the inputs in the order of ``run``'s parameters, without those that the runtime passes."""
        return tuple(each for each in cls._signature()[0] if each.name not in _FROM_RUNTIME)

    @classmethod
    def from_runtime(cls) -> Mapping[str, type]:
        """Return the types of the parameters that the runtime passes to ``run``: engine and state."""
        return {each.name: each.type for each in cls._signature()[0] if each.name in _FROM_RUNTIME}

    @classmethod
    def capability(cls) -> type | None:
        """Return the capability that the node asks of its role's engine; None for a node without a role."""
        return cls.from_runtime().get("engine")

    @classmethod
    def output(cls) -> type:
        """Return the type of the output."""
        return cls._signature()[1]

    @classmethod
    def check_signature(cls) -> None:
        """Raise GraphError, its path counted from the node, for a ``run`` without all type annotations."""
        try:
            cls._signature()
        except (AttributeError, KeyError, NameError, TypeError) as error:
            raise GraphError(
                "node", f"'{cls.kind}': the types of run cannot be read ({error!r})", fix="annotate all of it"
            ) from None

    @classmethod
    @cache  # because planning asks for signatures often
    def _signature(cls) -> tuple[tuple[Input, ...], type]:
        """Return the inputs and the output of ``run``, which may pass ``**inputs`` to the ``run`` that it overrides."""
        inputs: dict[str, Input] = {}
        output: Any = None
        for run in (vars(each)["run"] for each in cls.__mro__ if "run" in vars(each)):
            hints: Mapping[str, Any] = get_type_hints(run)
            output = output or hints["return"]
            parameters = inspect.signature(run).parameters.values()
            for each in parameters:
                required = each.default is inspect.Parameter.empty
                if each.kind is inspect.Parameter.KEYWORD_ONLY and required:
                    raise TypeError(f"{each.name} is keyword-only, so it is not an input, and needs a default")
                if each.name != "self" and each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                    inputs.setdefault(each.name, Input(each.name, _without_none(hints[each.name]), required))
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
                return tuple(inputs.values()), output
        raise AttributeError("run")

    def check(self, connected: frozenset[str]) -> None:
        """Raise a UserError, its path counted from the node, for options that do not go with the inputs connected."""

    def check_steps(self, steps: int) -> None:
        """Raise a UserError, its path counted from the node, for options that do not go with the number of steps."""

    def check_host(self) -> None:
        """Raise a UserError or an EngineError where the node cannot run on this host, before anything starts."""

    def cautions(self, context: NodeContext) -> Iterable[str]:
        """Return a line ``OPTION: REASON`` for each option that is legal and yet probably not what is wanted."""
        return ()

    def formula(self, symbols: Mapping[str, str]) -> Formula | None:
        """Return the output as a formula for people, or None. ``symbols`` names the inputs that are connected."""
        return None

    @property
    def warmup_steps(self) -> int:
        """Return the number of first steps in which the node does not train its role yet."""
        return 0

    def new_state(self) -> State | None:
        """Return the state at the start of a run; None without one. By default a state needs no arguments."""
        kind = self.from_runtime().get("state")
        return None if kind is None else kind()


def old_probability(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """Return where p_old comes from: from ``old_logprobs`` where that is connected, else from the sampling engine."""
    return {"p_old": f"p by {symbols.get('old_logprobs') or symbols.get('rollouts', 'rollouts')}"}


def times(coefficient: float, term: str) -> str:
    """Return the product, without a factor of 1."""
    return term if coefficient == 1 else f"{coefficient:g} {term}"


def inheritance_depth(instance: object, method: str) -> int:
    """Return how many base classes up a method is defined: a method overridden alone has outdated its formula."""
    return next(depth for depth, owner in enumerate(type(instance).__mro__) if method in vars(owner))


def _without_none(hint: Any) -> type:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if not isinstance(hint, type):
        raise TypeError(f"{hint} is not a class")
    return hint
