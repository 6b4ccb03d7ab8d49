"""How many bytes travel on the edges of the graph: from the types that its nodes give, and the lengths of a step."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from rlflow.batch import Metrics, Packed, Prompts, Sequences
from rlflow.compiler.graph import SOURCES, Graph
from rlflow.resources.workload import Edge, Task

# Token ids and versions are int32, logprobs and values float32.
_TOKEN_BYTES = 4
# Of text in UTF-8, a token: English has 4 to 5 letters a token, numbers and code fewer. And of each text, pickled.
_TEXT_BYTES, _EACH_TEXT_BYTES = 4, 16
# What a node hands on as it was given: it is in the store once, with the edge that it came from.
_HANDED_ON = ("prompt_ids", "rows")


def edges_of(graph: Graph, tasks: tuple[Task, ...]) -> tuple[Edge, ...]:
    """The data's edges first, then those of the nodes in their order. Metrics count nothing, nor do keys."""
    by_node = {task.node: task for task in tasks}
    edges = []
    for name in sorted(graph.sources):
        readers = tuple(dict.fromkeys(_readers(graph, name)))
        edges.append(
            Edge(name=name, role=None, bytes=_source_bytes(SOURCES[name], by_node[readers[0]]), readers=readers)
        )
    for node in graph.nodes:
        if not issubclass(output := node.operation.output(), Metrics):
            readers = tuple(dict.fromkeys(_readers(graph, node.name)))
            size = _output_bytes(output, by_node[node.name])
            edges.append(Edge(name=node.name, role=node.role, bytes=size, readers=readers))
    return tuple(edges)


def _readers(graph: Graph, name: str) -> Iterator[str]:
    """The nodes that read an edge, and those that read what hands it on."""
    for node in graph.nodes:
        if name in node.inputs.values():
            yield node.name
            if issubclass(node.operation.output(), Sequences):
                yield from _readers(graph, node.name)


def _source_bytes(kind: type, task: Task) -> float:
    """Of the step's rows, each once. Its text is taken for as long as the prompt's."""
    rows = task.samples / task.group_size
    each = task.prompts.mean * (_TOKEN_BYTES + _TEXT_BYTES) + _EACH_TEXT_BYTES
    return rows * (each if issubclass(kind, Prompts) else each + task.responses.mean * _TOKEN_BYTES)


def _output_bytes(kind: type, task: Task) -> float:
    """Of what a node makes."""
    each_token = each_sample = 0
    hints: Mapping[str, Any] = get_type_hints(kind)
    for name, hint in hints.items():
        if name in _HANDED_ON or name == "keys":
            continue
        if hint is Packed:
            each_token += _TOKEN_BYTES
        elif get_args(hint)[:1] == (str,):
            each_token += _TEXT_BYTES
            each_sample += _EACH_TEXT_BYTES
        elif get_origin(hint) is np.ndarray:
            number = get_args(get_args(hint)[1])[0]
            each_sample += np.dtype(number).itemsize
    return task.samples * (task.responses.mean * each_token + each_sample)
