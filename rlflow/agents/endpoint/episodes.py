"""The episodes whose calls are accepted, and the keys that open them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.history import ChatHistory
from rlflow.agents.messages import OpenEpisode

_MAX_OPEN_CALLS = 256
_MAX_NAMES = 64


@dataclass(eq=False)
class EndpointEpisode:
    """An episode that the engine has opened."""

    id: str
    key: bytes
    """The digest of its token."""
    worker_key: bytes
    history: ChatHistory = field(default_factory=ChatHistory)
    idempotency_keys: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
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
        self._workers: Counter[bytes] = Counter()

    def open(self, message: OpenEpisode) -> None:
        """Accept the calls of an episode."""
        episode = EndpointEpisode(message.episode, _digest(message.token), _digest(message.worker_token))
        self._episodes[episode.id] = self._by_key[episode.key] = episode
        self._workers[episode.worker_key] += 1

    def close(self, id: str) -> None:
        """Forget an episode, if it is open."""
        if episode := self._episodes.pop(id, None):
            del self._by_key[episode.key]
            for name in episode.names:
                del self._by_name[episode.worker_key, name]
            self._workers[episode.worker_key] -= 1
            self._workers += Counter()  # drops zeros

    def set_name(self, episode: EndpointEpisode, name: object) -> None:
        """Have requests with the key of the episode's worker and this name count as the episode's."""
        if not (isinstance(name, str) and 0 < len(name) <= 256):
            raise ApiError("'name' must be a text of 1 to 256 characters")
        if self._by_name.setdefault((episode.worker_key, name), episode) is not episode:
            raise ApiError("another episode has this name", 409)
        if name not in episode.names:
            if len(episode.names) == _MAX_NAMES:
                del self._by_name[episode.worker_key, name]
                raise ApiError(f"an episode has at most {_MAX_NAMES} names")
            episode.names.append(name)

    def find(self, headers: Mapping[str, str]) -> EndpointEpisode | None:
        """Return the episode of a request; None if a worker's key comes without a name. Raises ApiError."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            token = headers.get("x-api-key", "")
        key = _digest(token.strip())
        if key in self._by_key:
            return self._by_key[key]
        name = headers.get("X-Session-ID")
        if key not in self._workers or (name is not None and (key, name) not in self._by_name):
            raise ApiError("the key is wrong, or its episode has ended", 401, "invalid_api_key")
        return None if name is None else self._by_name[key, name]


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
