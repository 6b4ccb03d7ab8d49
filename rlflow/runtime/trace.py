"""The trace of a run: ``trace.json`` for Perfetto and Chrome, in the Trace Event Format.

One row per node, one group of rows per worker with the calls of its engine, and arrows along the edges of the graph.
All times are in microseconds since the start of the trace. Each process reads its own host's clock.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlflow.compiler.graph import Graph
from rlflow.compiler.plan import Plan
from rlflow.engines.times import Span, Times
from rlflow.recipe import Trace
from rlflow.runtime.protocols import Engines, Observer

FILE = "trace.json"
CONTROLLER = "controller"
"""The group of rows of the process that runs the graph."""
# The work of the controller besides nodes that calls engines.
_COPY, _EVALUATION = "copy", "evaluation"
_END = "\n]\n"

Event = dict[str, Any]


class TraceWriter(Observer):
    """A writer of the trace of a run, or of some of its steps."""

    def __init__(self, steps: Trace) -> None:
        """Trace the steps with these numbers, counted from 1, or all for True."""
        self._steps = steps
        self._start = time.time_ns()
        self._rows = _Rows(self._start)
        self._file: IO[str] | None = None
        self._is_new = True
        self._num_arrows = 0
        self._nodes = Times()

    def follow(self, engines: Engines) -> None:
        """Trace these engines from now on."""
        if engines.trace is not self._nodes:  # engines that have lost nothing go on after a return to a checkpoint
            engines.trace = self._nodes
            self._take_calls = engines.record_calls()

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._plan = plan
        path = directory / FILE
        if self._is_new:
            path.write_text("[")
        else:  # the run has gone back to a checkpoint
            path.write_text(path.read_text().removesuffix(_END))
        self._file = path.open("a")
        names = {CONTROLLER: CONTROLLER}
        for role, placement in plan.roles.items():
            for rank, worker in enumerate(placement.workers):
                gpus = ", ".join(str(bundle.gpu) for bundle in worker.bundles)
                names[f"{role}/{rank}"] = f"{role}/{rank} on {worker.bundles[0].host}, GPU {gpus}"
        self._write(self._rows.name_processes(names))

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        nodes, calls = self._nodes.take(), self._take_calls()
        if isinstance(self._steps, tuple) and step not in self._steps:
            return
        number = {"step": step}
        events = [self._rows.slice(CONTROLLER, node.name, node, number) for node in nodes]
        for process, spans in calls.items():
            role = process.partition("/")[0]
            candidates = [node for node in nodes if self._can_cause(node.name, role)]
            for call in spans:
                named = Span(cause_of(call, candidates), call.start, call.end)
                events.append(self._rows.slice(process, "", named, {**number, "method": call.name}))
        for producer, consumer in arrows(nodes, edges_of(self._plan)):
            self._num_arrows += 1
            events += self._rows.arrow(self._num_arrows, producer, consumer)
        self._write([*self._rows.take_new_names(), *events])

    def close(self) -> None:
        if self._file is not None:
            self._file.write(_END)
            self._file.close()
            self._file = None

    def _can_cause(self, name: str, role: str) -> bool:
        """Return whether the controller's work of this name may call engines of the role."""
        roles = {node.name: node.role for node in self._plan.graph.nodes}
        return roles[name] == role if name in roles else name in (_COPY, _EVALUATION)

    def _write(self, events: Iterable[Event]) -> None:
        assert self._file is not None
        for event in events:
            self._file.write(("\n" if self._is_new else ",\n") + json.dumps(event))
            self._is_new = False
        self._file.flush()


class _Rows:
    """The rows of a trace. Slices of one row do not overlap, so a process may need several rows of a name."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], list[int]] = {}
        """The rows of a name in a process."""
        self._ends: list[int] = []
        """The end of the last slice of each row, by its number."""
        self._places: dict[Span, tuple[int, int]] = {}
        """The process and the row of each slice of the controller in this step."""
        self._new: list[Event] = []

    def name_processes(self, names: Mapping[str, str]) -> list[Event]:
        """Return events that name the processes, in this order."""
        events = []
        for process, name in names.items():
            pid = self._processes.setdefault(process, len(self._processes) + 1)
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        return events

    def slice(self, process: str, row: str, span: Span, details: Mapping[str, Any]) -> Event:
        """Return the event of a slice."""
        pid, tid = self._processes[process], self._free_row(process, row, span)
        if process == CONTROLLER:
            self._places[span] = pid, tid
        times = {"ts": self._microseconds(span.start), "dur": (span.end - span.start) / 1000}
        return {"ph": "X", "pid": pid, "tid": tid, "name": span.name, **times, "args": dict(details)}

    def arrow(self, number: int, producer: Span, consumer: Span) -> list[Event]:
        """Return the two ends of an arrow between slices of the controller."""
        # Inside the producer's slice, and not after the consumer has started, which may be before the producer ends.
        leaves = max(producer.start, min(producer.end - 1000, consumer.start))
        events = []
        for phase, span, at in (("s", producer, leaves), ("f", consumer, consumer.start)):
            pid, tid = self._places[span]
            end = {"bp": "e"} if phase == "f" else {}
            shared = {"cat": "data", "id": number, "name": producer.name}
            events.append({"ph": phase, "pid": pid, "tid": tid, "ts": self._microseconds(at), **shared, **end})
        return events

    def take_new_names(self) -> list[Event]:
        """Return events that name the rows that are new since the last call, and forget the places of slices."""
        self._places.clear()
        new, self._new = self._new, []
        return new

    def _free_row(self, process: str, name: str, span: Span) -> int:
        rows = self._rows.setdefault((process, name), [])
        row = next((number for number in rows if self._ends[number] <= span.start), None)
        if row is None:
            row = len(self._ends)
            rows.append(row)
            self._ends.append(0)
            names = {"thread_name": {"name": name or "engine"}, "thread_sort_index": {"sort_index": row}}
            pid = self._processes[process]
            self._new += [{"ph": "M", "pid": pid, "tid": row, "name": key, "args": args} for key, args in names.items()]
        self._ends[row] = span.end
        return row

    def _microseconds(self, time_ns: int) -> float:
        return (time_ns - self._start) / 1000


def edges_of(plan: Plan) -> list[tuple[str, str]]:
    """Return the edges of a plan's graph, and the way of the weights to their sync.

    Nodes that run ahead of their step are left out, since the data of several steps is under way.
    """
    graph: Graph = plan.graph
    ahead = {node.name for node in graph.ahead_nodes()} if plan.recipe.overlap.max_staleness else set()
    nodes = {node.name for node in graph.nodes} - ahead
    edges = [(origin, node.name) for node in graph.nodes for origin in node.inputs.values()]
    last = {node.role: node.name for node in graph.nodes}
    edges += [(last[sync.source], _COPY) for sync in plan.workload.weight_syncs if sync.source in last]
    return [(origin, target) for origin, target in edges if origin in nodes and target in {*nodes, _COPY}]


def arrows(spans: Sequence[Span], edges: Iterable[tuple[str, str]]) -> list[tuple[Span, Span]]:
    """Return the producer and the consumer of each arrow.

    It goes to the consumer's first slice, from the last slice of the producer that starts before.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    pairs = []
    for origin, target in edges:
        consumer = next((span for span in ordered if span.name == target), None)
        before = [span for span in ordered if span.name == origin and consumer and span.start <= consumer.start]
        if consumer and before:
            pairs.append((before[-1], consumer))
    return pairs


def cause_of(call: Span, candidates: Iterable[Span]) -> str:
    """Return the name of the candidate that overlaps most with a call; without one the method's name."""
    overlaps = {span: min(span.end, call.end) - max(span.start, call.start) for span in candidates}
    best = max(overlaps, key=lambda span: overlaps[span], default=None)
    return best.name if best is not None and overlaps[best] > 0 else call.name
