"""A callback of Hydra that records that it was made; a recipe must never get that far."""

from typing import Any

EFFECTS: list[str] = []


class Callback:
    def __init__(self, name: str = "callback", **_: Any) -> None:
        EFFECTS.append(name)

    def on_job_start(self, **_: Any) -> None:
        EFFECTS.append("job start")
