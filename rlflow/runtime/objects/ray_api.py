"""The little of Ray that all rooms of the runtime share: a quiet import, the id of this host, waiting for calls."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any


def import_ray() -> Any:
    """Return the module ``ray``, with its logging limited to errors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The caller reports what fails.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Applies to a Ray that is started here: the machine is there for the engines, so they keep their priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start a worker for every CPU ahead of time, and engines have workers of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Nobody reads its own metrics, and with Ray 2.60 their collection can crash a process that starts.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    import ray

    logger = logging.getLogger("ray")
    if logger.level != logging.ERROR:  # setting it empties the caches of all loggers
        logger.setLevel(logging.ERROR)
    return ray


def this_host() -> str:
    """Return the id of the Ray node that this process is on."""
    node_id: str = import_ray().get_runtime_context().get_node_id()
    return node_id


def wait_all(calls: "Sequence[Future[Any]]") -> list[Any]:
    """Return the results in the order of ``calls``. Raises the first failure at once, and leaves the others running."""
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for call in done:
        if (error := call.exception()) is not None:
            raise error
    return [call.result() for call in calls]
