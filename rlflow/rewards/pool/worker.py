"""In a worker: calls in, outcomes out, one after another."""

import os
import pickle
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlflow.errors import first_line
from rlflow.rewards.base import Failure
from rlflow.rewards.found import Found
from rlflow.rewards.pool.channel import Channel
from rlflow.rewards.processes import become_subreaper, die_with_parent

# Of what a function may take beyond what is there when its worker is forked.
_MEMORY = 4 * 2**30


def work(channel: Channel, functions: Mapping[str, Found], nursery: int) -> None:
    """Answers until the other end has gone. ``nursery`` is the parent's process id."""
    os.setsid()
    die_with_parent(nursery)
    become_subreaper()
    # In pages: all, resident, shared, code, none, data.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + _MEMORY, data + _MEMORY))
    with suppress(OSError):
        # Of all processes of the host the first to go when memory is short.
        Path("/proc/self/oom_score_adj").write_text("1000")
    while (calls := channel.messages()) is not None:
        for part, texts, rows in calls:
            channel.send(pickle.dumps(outcomes_of(functions[part], texts, rows)))


def outcomes_of(found: Found, texts: Sequence[str], rows: Sequence[Any]) -> list[Any]:
    """As many as texts, whatever the function does."""
    try:
        given = list(islice(found.call(texts, rows), len(texts) + 1))
    except BaseException as error:  # whatever the user's own function raises, sys.exit too
        return [Failure("raised", f"failed ({first_line(error)})")] * len(texts)
    if len(given) != len(texts):
        plural = "" if len(texts) == 1 else "s"
        number = f"more than {len(texts)}" if len(given) > len(texts) else len(given)
        fact = f"returned {number} values for {len(texts)} response{plural}"
        return [Failure("invalid", fact)] * len(texts)
    return [found.check(value, text) for value, text in zip(given, texts, strict=True)]
