"""How many bytes travel on the edges of the graph: from the types that its nodes give, and the lengths of a step."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from rlflow.batch import Metrics, Packed, Pairs, Prompts, Repeated, Sequences
from rlflow.compiler.graph import SOURCES, Graph
from rlflow.nodes.generate import Converse, Generate
from rlflow.resources.workload import Edge, Task

# Token ids are int32, logprobs and values float32; so are numbers that stand for all tokens of a sample.
_TOKEN_BYTES = 4
# Besides the text itself, of each that is pickled, and of each row of a data set, for the names of its fields.
_EACH_TEXT_BYTES, _EACH_ROW_BYTES = 15, 64
# Of a number whose type says no size.
_NUMBER_BYTES = 8
# What a node hands on as it was given: it is in the store once, with the edge that it came from.
_HANDED_ON = ("prompt_ids", "rows")


def edges_of(graph: Graph, tasks: tuple[Task, ...], text_bytes: float) -> tuple[Edge, ...]:
    """The data's edges first, then those of the nodes in their order. Metrics count nothing, nor do keys.

    ``text_bytes`` are those of a token as text.
    """
    by_node = {task.node: task for task in tasks}
    edges = []
    for name in sorted(graph.sources):
        readers = tuple(dict.fromkeys(_readers(graph, name)))
        size = _source_bytes(SOURCES[name], by_node[readers[0]], text_bytes)
        edges.append(Edge(name=name, role=None, bytes=size, stored=size, readers=readers))
    for node in graph.nodes:
        if not issubclass(output := node.operation.output(), Metrics):
            readers = tuple(dict.fromkeys(_readers(graph, node.name)))
            ragged, numbers = _output_bytes(output, by_node[node.name], text_bytes)
            if isinstance(node.operation, Generate):
                # What is left of a step is there beside what is given, until the next one.
                ragged *= 1 + node.operation.overcommit
            if isinstance(node.operation, Converse):
                # The last turn, and all that was said before it, are there beside the prompts of the next.
                ragged *= 2
            edges.append(Edge(name=node.name, role=node.role, bytes=ragged + numbers, stored=ragged, readers=readers))
    return tuple(edges)


def _readers(graph: Graph, name: str) -> Iterator[str]:
    """The nodes that read an edge, and those that read what hands it on."""
    for node in graph.nodes:
        if name in node.inputs.values():
            yield node.name
            if issubclass(node.operation.output(), Sequences):
                yield from _readers(graph, node.name)


def _source_bytes(kind: type, task: Task, text_bytes: float) -> float:
    """Of the step's rows, each once. Its text is taken for as long as the prompt's."""
    rows = task.samples / task.group_size
    if issubclass(kind, Prompts):
        return rows * (task.prompts.mean * (_TOKEN_BYTES + text_bytes) + _EACH_ROW_BYTES)
    responses = Pairs.unit_size if issubclass(kind, Pairs) else 1
    return rows * responses * (task.prompts.mean + task.responses.mean) * _TOKEN_BYTES


def _output_bytes(kind: type, task: Task, text_bytes: float) -> tuple[float, float]:
    """Of what a node makes: a value a token, and texts; and numbers, one a sample."""
    each_token = each_text = each_number = 0.0
    hints: Mapping[str, Any] = get_type_hints(kind)
    for name, hint in hints.items():
        if name in _HANDED_ON or name == "keys":
            continue
        if hint is Packed:
            each_token += _TOKEN_BYTES
        elif hint is Repeated:
            each_number += _TOKEN_BYTES
        elif get_args(hint)[:1] == (str,):
            each_token += text_bytes
            each_text += _EACH_TEXT_BYTES
        elif np.ndarray in (hint, get_origin(hint)):
            each_number += _number_bytes(hint)
    return task.samples * (task.responses.mean * each_token + each_text), task.samples * each_number


def _number_bytes(array: Any) -> int:
    """Of ``NDArray[np.float32]`` 4; of a plain ``np.ndarray``, or one of an abstract type, what most have."""
    try:
        size: int = get_args(get_args(array)[1])[0]().itemsize
    except (IndexError, TypeError):
        return _NUMBER_BYTES
    return size
