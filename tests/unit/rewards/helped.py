"""A reward function whose module starts a process, of which it gives the process id."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

HELPER = subprocess.Popen(["sleep", "1000"])


def reward(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    if texts[0] == "exit":
        os._exit(0)
    return [float(HELPER.pid)]
