"""A stand-in for the Hugging Face hub, which answers what huggingface_hub's client asks when it uploads a folder."""

import hashlib
import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USER, TOKEN = "ada", "hf_marked8125Secret"
"""The only user, and the token that may write to the user's repositories."""
READER = "hf_marked6620Reader"
"""A token that may only read."""


@dataclass
class Repository:
    private: bool = True
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    failing: dict[str, int] = field(default_factory=dict)
    """Parts of a path that are answered with an error, and its status."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Contents that came by the protocol for large files, by their SHA-256."""

    def answer(self, method: str, path: str, token: str, content: bytes) -> Any:
        """Return a status, what becomes JSON, or both."""
        for part, status in self.failing.items():
            if part in path:
                return status
        if path.startswith("/large/"):
            oid = path.removeprefix("/large/")
            assert hashlib.sha256(content).hexdigest() == oid
            self.large[oid] = content
            return {}
        if token not in (TOKEN, READER):
            return 401
        if path == "/api/repos/create":
            return self._create(token, json.loads(content))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(content)["content"])
        name, asked = _name_and_rest(path)
        if name not in self.repositories:
            return 404
        if method == "POST" and token != TOKEN:
            return 403
        return _ANSWERS[asked](self, name, token, content)

    def _create(self, token: str, wanted: Mapping[str, Any]) -> Any:
        name = f"{wanted['organization']}/{wanted['name']}"
        if token != TOKEN or wanted["organization"] != USER:
            return 403
        created = {"url": f"{self.url}/{name}"}
        if name in self.repositories:
            return 409, created
        self.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return created

    def _validate(self, card: str) -> Any:
        _, metadata, _ = card.split("---\n", 2)
        is_valid = isinstance(yaml.safe_load(metadata), dict)
        return {"warnings": [], "errors": []} if is_valid else 400

    def _info(self, name: str, token: str, content: bytes) -> Any:
        return {"id": name, "private": self.repositories[name].private, "sha": "0" * 40, "siblings": []}

    def _may_write(self, name: str, token: str, content: bytes) -> Any:
        return {} if token == TOKEN and name.startswith(f"{USER}/") else 403

    def _tree(self, name: str, token: str, content: bytes) -> Any:
        files = self.repositories[name].files.items()
        return [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files]

    def _preupload(self, name: str, token: str, content: bytes) -> Any:
        paths = [file["path"] for file in json.loads(content)["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def _large_files(self, name: str, token: str, content: bytes) -> Any:
        wanted = json.loads(content)["objects"]
        upload = [{"upload": {"href": f"{self.url}/large/{each['oid']}"}} for each in wanted]
        return {"objects": [{**each, "actions": actions} for each, actions in zip(wanted, upload, strict=True)]}

    def _commit(self, name: str, token: str, content: bytes) -> Any:
        repository = self.repositories[name]
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.commits.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.large[value["oid"]]
                case "deletedFile":
                    del repository.files[value["path"]]
        return {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}


_ANSWERS: Mapping[str, Callable[[Hub, str, str, bytes], Any]] = {
    "": Hub._info,
    "auth-check/write": Hub._may_write,
    "tree/main": Hub._tree,
    "preupload/main": Hub._preupload,
    "commit/main": Hub._commit,
    "info/lfs/objects/batch": Hub._large_files,
}


def _name_and_rest(path: str) -> tuple[str, str]:
    """Split ``/api/models/USER/NAME/...`` and ``/USER/NAME.git/...``."""
    user, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
    return f"{user}/{name.removesuffix('.git')}", "/".join(rest)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            content = self.rfile.read(int(self.headers["Content-Length"] or 0))
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            given = hub.answer(self.command, path, token, content)
            given = (given, {}) if isinstance(given, int) else given
            status, shown = given if isinstance(given, tuple) else (200, given)
            body = json.dumps(shown).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
