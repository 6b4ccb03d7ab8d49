"""A service that answers as a test tells it to."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any


@dataclass
class Service:
    url: str
    asked: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)
    """Path, content and authorization of each request."""
    closing: Event = field(default_factory=Event)
    """Set when the service closes; late answers wait for it."""


@contextmanager
def serving(answer: Callable[[Service, dict[str, Any]], Any]) -> Iterator[Service]:
    """Serve answers: ``answer`` returns an HTTP status, bytes, or an object for JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.asked.append((self.path, content, self.headers["Authorization"]))
            given = answer(service, content)
            body = given if isinstance(given, bytes) else json.dumps(given).encode()
            self.send_response(given if isinstance(given, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # whoever asked has gone
        service = Service(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield service
        finally:
            service.closing.set()
            server.shutdown()
            thread.join()
