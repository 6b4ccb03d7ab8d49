"""The rules of the Trace Event Format on which viewers rely, and the times in a trace."""

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
# The keys that the format requires of each kind of event.
_KEYS = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "name", "ts", "dur", "args"},
    "s": {"pid", "tid", "name", "ts", "id", "cat"},
    "f": {"pid", "tid", "name", "ts", "id", "cat", "bp"},
}


def checked_events(path: Path) -> list[Event]:
    """Return the events of a trace, which must keep the rules."""
    events: list[Event] = json.loads(path.read_text())
    for event in events:
        assert event.keys() >= _KEYS[event["ph"]], event
    named = {(event["pid"], event.get("tid")) for event in events if event["ph"] == "M" and "name" in event["args"]}
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= named, event
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    for slices in rows.values():
        slices.sort(key=lambda event: float(event["ts"]))
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, "slices of a row neither overlap nor nest"
    _check_arrows(events, rows)
    return events


def _check_arrows(events: list[Event], rows: Mapping[tuple[int, int], list[Event]]) -> None:
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
            (around,) = [
                each
                for each in rows[event["pid"], event["tid"]]
                if each["ts"] <= event["ts"] <= each["ts"] + each["dur"] and each["dur"]
            ][-1:]
            assert around["name"] == event["name"] or event["ph"] == "f"
    for both in ends.values():
        assert both.keys() == {"s", "f"}
        assert both["s"]["ts"] <= both["f"]["ts"]
        assert (both["s"]["cat"], both["s"]["name"]) == (both["f"]["cat"], both["f"]["name"])


def process_names(events: list[Event]) -> dict[int, str]:
    """Return the names of the groups of rows."""
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def seconds_of(events: list[Event], process: str) -> dict[tuple[int, str], float]:
    """Return the time of each step and name in a process."""
    (pid,) = [pid for pid, name in process_names(events).items() if name == process]
    found: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[event["args"]["step"], event["name"]] += event["dur"] / 1e6
    return dict(found)


def arrows_of(events: list[Event], step: int) -> set[tuple[str, str]]:
    """Return the slices that the arrows of a step connect."""
    slices = [event for event in events if event["ph"] == "X" and event["args"]["step"] == step]
    at = {(event["pid"], event["tid"], event["ts"]): event["name"] for event in slices}
    return {
        (event["name"], at[key])
        for event in events
        if event["ph"] == "f" and (key := (event["pid"], event["tid"], event["ts"])) in at
    }
