"""Serves a page about a run that goes on: ``rlflow watch RUN... [--port PORT]``.

The page is that of ``rlflow.report``, and fetches new figures every few seconds. This process reads the files of the
run's folder and writes none, so it can start and end at any time, and the run does not notice.
"""

import argparse
import hmac
import json
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlflow.errors import RecipeError, UserError
from rlflow.report.page import build_page
from rlflow.report.run_figures import RunFiles
from rlflow.report.run_page import TEMPLATE, page_figures

_ADDRESS = "127.0.0.1"
# The names under which a browser may ask. Another one belongs to a site that has its name point to this machine.
_NAMES = ("127.0.0.1", "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RunServer(ThreadingHTTPServer):
    """A server on this machine alone, with two answers: the page and its figures.

    Other users of the machine cannot guess the ``url``.
    """

    daemon_threads = True

    def __init__(self, files: Sequence[RunFiles], port: int = 0) -> None:
        """Serve runs at ``port``, or at a free port for 0. Raises OSError for a port that is taken."""
        super().__init__((_ADDRESS, port), _Handler)
        self._folder = f"/{secrets.token_urlsafe(16)}"
        self._files = files
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://{_ADDRESS}:{self.server_port}{self._folder}/"

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return the type and the content of an answer; None for any other path. Raises FileError for damaged files."""
        folder, _, name = path.rpartition("/")
        if not hmac.compare_digest(folder.encode(), self._folder.encode()) or name not in ("", "figures.json"):
            return None
        # Requests of several windows come at the same time.
        with self._lock:
            figures = page_figures(self._files)
        if name:
            return "application/json", json.dumps(figures).encode()
        return "text/html; charset=utf-8", build_page(TEMPLATE, figures, "refresh.js").encode()


class _Handler(BaseHTTPRequestHandler):
    """An answer to one request."""

    server: RunServer
    server_version, sys_version = "rlflow", ""
    # Seconds, for a client that says nothing.
    timeout = 30

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        status = 200
        try:
            answer = self.server.answer(self.path) if host in _NAMES else None
        except UserError as error:
            status, answer = 500, ("text/plain; charset=utf-8", str(error).encode("utf-8", "replace"))
        if answer is None:
            self.send_error(404)
            return
        kind, content = answer
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for a request."""


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser("rlflow watch", description="Serve a live page about runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, outputs/DATE/TIME")
    parser.add_argument("--port", type=int, default=0, help="the port on this machine, by default any that is free")
    options = parser.parse_args(arguments)
    files = [RunFiles(folder) for folder in options.runs]
    page_figures(files)  # which raises for damaged files before anybody opens the page
    with _server(files, options.port) as server, suppress(KeyboardInterrupt):
        print(f"{server.url} (Ctrl-C ends it; the run goes on)", flush=True)
        server.serve_forever()
    return 0


def _server(files: Sequence[RunFiles], port: int) -> RunServer:
    try:
        return RunServer(files, port)
    except (OSError, OverflowError) as error:
        fix = "another port, or leave out --port"
        raise RecipeError("--port", f"{port} cannot be used ({error})", fix=fix) from None
