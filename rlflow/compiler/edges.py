"""The bytes on the edges of the graph, from the output types of its nodes and the expected lengths of a step."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from rlflow.batch import Metrics, Packed, Pairs, Prompts, Repeated, Sequences
from rlflow.compiler.graph import SOURCES, Graph
from rlflow.resources.workload import Edge, Task

# Token ids are int32; logprobs and values are float32, and so are numbers repeated for all tokens of a sample.
_TOKEN_BYTES = 4
# Pickling adds so much to each text, and to each row of a data set for the names of its fields.
_TEXT_OVERHEAD_BYTES, _ROW_OVERHEAD_BYTES = 15, 64
# A token of an image stands for 28 x 28 pixels in most models; a JPEG has about a quarter of a byte for each.
_IMAGE_TOKEN_BYTES = 196
# The size of a number whose type does not tell it.
_NUMBER_BYTES = 8
# Columns that a node passes on unchanged: they are stored once, with the edge that they come from.
_PASSED_ON = ("prompt_ids", "rows")
# Packed columns that have no value for each token: one for each turn, and none for conversations that are done.
_SMALL = ("turn_rewards", "unfinished")


def graph_edges(
    graph: Graph, tasks: tuple[Task, ...], text_bytes: float, routing_bytes: Mapping[str, int]
) -> tuple[Edge, ...]:
    """Return the edges of the data, then those of the nodes in their order. Metrics and keys count as no bytes.

    ``text_bytes`` is the expected size of a token as text, and ``routing_bytes`` that of its experts, by the role that
    generates it.
    """
    by_node = {task.node: task for task in tasks}
    edges = []
    for name in sorted(graph.sources):
        readers = tuple(dict.fromkeys(_readers(graph, name)))
        size = _source_bytes(SOURCES[name], by_node[readers[0]], text_bytes)
        edges.append(Edge(name=name, role=None, bytes=size, stored=size, readers=readers))
    for node in graph.nodes:
        if node.name in by_node and not issubclass(output := node.operation.output(), Metrics):
            readers = tuple(dict.fromkeys(_readers(graph, node.name)))
            task = by_node[node.name]
            ragged, numbers = _output_bytes(output, task, text_bytes)
            routing = task.tokens * routing_bytes.get(str(node.role), 0) if task.kind == "generate" else 0.0
            stored = ragged + routing
            # Numbers come to the controller.
            role = node.role or (task.hosts_of if ragged else None)
            size = stored + numbers
            edges.append(Edge(name=node.name, role=role, bytes=size, stored=stored, routing=routing, readers=readers))
    return tuple(edges)


def _readers(graph: Graph, name: str) -> Iterator[str]:
    """Yield the nodes that read an edge, and the nodes that read what its readers pass on."""
    for node in graph.nodes:
        if name in node.inputs.values():
            yield node.name
            if issubclass(node.operation.output(), Sequences):
                yield from _readers(graph, node.name)


def _source_bytes(kind: type, task: Task, text_bytes: float) -> float:
    """Return the bytes of the step's rows, each counted once. The text of a row is assumed as long as its prompt."""
    rows = task.samples / task.group_size
    images = task.image_tokens * _IMAGE_TOKEN_BYTES
    if issubclass(kind, Prompts):
        text = (task.prompts.mean - task.image_tokens) * text_bytes + _ROW_OVERHEAD_BYTES
        return rows * (task.prompts.mean * _TOKEN_BYTES + text + images)
    responses = Pairs.unit_size if issubclass(kind, Pairs) else 1
    return rows * (responses * (task.prompts.mean + task.responses.mean) * _TOKEN_BYTES + images)


def _output_bytes(kind: type, task: Task, text_bytes: float) -> tuple[float, float]:
    """Return the bytes of a node's values for each token and texts, and of its numbers for each sample."""
    each_token = each_text = each_number = 0.0
    hints: Mapping[str, Any] = get_type_hints(kind)
    for name, hint in hints.items():
        if name in (*_PASSED_ON, *_SMALL, "keys"):
            continue
        if hint is Packed:
            each_token += _TOKEN_BYTES
        elif hint is Repeated:
            each_number += _TOKEN_BYTES
        elif get_args(hint)[:1] == (str,):
            each_token += text_bytes
            each_text += _TEXT_OVERHEAD_BYTES
        elif np.ndarray in (hint, get_origin(hint)):
            each_number += _number_bytes(hint)
    return task.samples * (task.responses.mean * each_token + each_text), task.samples * each_number


def _number_bytes(array: Any) -> int:
    """Return the item size of an array type: 4 for ``NDArray[np.float32]``, 8 where the type does not tell it."""
    try:
        size: int = get_args(get_args(array)[1])[0]().itemsize
    except (IndexError, TypeError):
        return _NUMBER_BYTES
    return size
