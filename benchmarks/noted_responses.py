"""Notes of the responses that the processes of a run generate, record in its journal, or find there."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rlflow.engines.journal import Journal, RecordedResponses


def responses_log(folder: Path) -> Path:
    """Return the file of the notes about a run in ``folder``."""
    return folder.with_name(f"{folder.name}.responses")


def note_responses(log: Path) -> None:
    """Have this process, a run with the engine ``transformers``, write a line for each batch of responses.

    The engine starts to decode a batch unless it finds all of it in the journal.
    """
    add, find = Journal.add, RecordedResponses.find

    def note(**line: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def add_noted(journal: Journal, rollouts: Any, samples: Any, sampling: Any) -> None:
        add(journal, rollouts, samples, sampling)
        note(recorded=[[journal.version, sampling.temperature, *key] for key in samples.keys.tolist()])

    def find_noted(recorded: RecordedResponses, samples: Any, sampling: Any) -> Any:
        rows, rollouts = find(recorded, samples, sampling)
        note(**({"found": len(rows)} if len(rows) == len(samples) else {"started": len(samples)}))
        return rows, rollouts

    Journal.add = add_noted  # type: ignore[assignment, method-assign]
    RecordedResponses.find = find_noted  # type: ignore[assignment, method-assign]


def count_responses(folder: Path) -> Counter[str]:
    """Return how many responses of a run were found in its journal, generated again, and not finished."""
    noted = [json.loads(line) for line in responses_log(folder).read_text().splitlines()]
    recorded = Counter(tuple(each) for line in noted for each in line.get("recorded", ()))
    return Counter(
        responses_found=sum(line.get("found", 0) for line in noted),
        generated_again=recorded.total() - len(recorded),
        responses_interrupted=sum(line.get("started", 0) for line in noted) - recorded.total(),
    )
