"""The episodes whose calls are accepted, and the keys that open them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.history import ChatHistory
from rlflow.agents.messages import OpenEpisode

_MAX_OPEN_CALLS = 256


@dataclass(eq=False)
class EndpointEpisode:
    """An episode that the engine has opened."""

    id: str
    key: bytes
    """The digest of its token."""
    worker_key: bytes
    history: ChatHistory = field(default_factory=ChatHistory)
    idempotency_keys: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    num_open_calls: int = 0

    def begin_call(self, headers: Mapping[str, str]) -> bool:
        """Count a call as open, and return whether the client says that it has asked this before."""
        if self.num_open_calls >= _MAX_OPEN_CALLS:
            raise ApiError(f"the episode has {_MAX_OPEN_CALLS} open calls", 429, "too_many_calls")
        self.num_open_calls += 1
        key = headers.get("Idempotency-Key")
        is_known = key in self.idempotency_keys
        if key is not None:
            self.idempotency_keys.add(key)
        return is_known or headers.get("x-stainless-retry-count", "0") not in ("", "0")


class Episodes:
    """All open episodes. Keys are looked up by their digests, so the time of a look-up tells nothing about them."""

    def __init__(self) -> None:
        self._episodes: dict[str, EndpointEpisode] = {}
        self._by_key: dict[bytes, EndpointEpisode] = {}
        self._by_name: dict[tuple[bytes, str], EndpointEpisode] = {}

    def open(self, message: OpenEpisode) -> None:
        """Accept the calls of an episode."""
        episode = EndpointEpisode(message.episode, _digest(message.token), _digest(message.worker_token))
        self._episodes[episode.id] = self._by_key[episode.key] = episode

    def close(self, id: str) -> None:
        """Forget an episode, if it is open."""
        if episode := self._episodes.pop(id, None):
            del self._by_key[episode.key]
            for name in episode.names:
                del self._by_name[episode.worker_key, name]

    def set_name(self, episode: EndpointEpisode, name: object) -> None:
        """Have requests with the key of the episode's worker and this name count as the episode's."""
        if not isinstance(name, str):
            raise ApiError("'name' must be a text")
        if self._by_name.setdefault((episode.worker_key, name), episode) is not episode:
            raise ApiError("another episode has this name", 409)
        episode.names.add(name)

    def find(self, headers: Mapping[str, str]) -> EndpointEpisode | None:
        """Return the episode of a request; None if a worker's key comes without a name. Raises ApiError."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            token = headers.get("x-api-key", "")
        key = _digest(token.strip())
        name = headers.get("X-Session-ID")
        episode = self._by_key.get(key) or self._by_name.get((key, name or ""))
        is_worker = name is None and any(key == episode.worker_key for episode in self._by_key.values())
        if episode is None and not is_worker:
            raise ApiError("the key is wrong, or its episode has ended", 401, "invalid_api_key")
        return episode


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
