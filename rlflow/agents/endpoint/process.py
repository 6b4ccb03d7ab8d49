"""The endpoint process of an engine, as the engine's process sees it."""

from collections.abc import Callable, Sequence

from rlflow.agents.base import ModelSpec
from rlflow.agents.messages import Call, CancelCall, CloseEpisode, Count, OpenEpisode, Refusal, Reply

FromEndpoint = Call | CancelCall | Count
ToEndpoint = OpenEpisode | CloseEpisode | Reply | Refusal


class Endpoint:
    """The endpoint process of an engine."""

    url: str

    def __init__(
        self, model: ModelSpec, receive: Callable[[Sequence[FromEndpoint]], None], died: Callable[[str], None]
    ) -> None:
        """Start the process. Raises EngineError."""
        raise NotImplementedError

    def send(self, messages: Sequence[ToEndpoint]) -> None:
        """Send messages; any thread may."""
        raise NotImplementedError
