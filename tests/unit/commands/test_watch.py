"""The live page: answers and refusals of its server, and how the page follows the run."""

import http.client
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import run_subcommand
from rlflow.commands.watch import RunServer
from rlflow.report.run_figures import RunFiles
from tests.browser import BROWSER, needs_browser
from tests.unit.report.test_run_page import write_run


@contextmanager
def served(files: RunFiles) -> Iterator[RunServer]:
    with RunServer([files]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunServer]:
    with served(RunFiles(write_run(tmp_path / "run"))) as server:
        yield server


def ask(server: RunServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def folder_of(server: RunServer) -> str:
    return server.url.removeprefix(f"http://127.0.0.1:{server.server_port}")


def test_the_page_and_its_figures_are_served(server: RunServer, tmp_path: Path) -> None:
    status, headers, page = ask(server, folder_of(server))
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'fetch("figures.json"' in page
    assert not re.search(rb"src=|@import|XMLHttpRequest|{{", page)
    status, headers, content = ask(server, f"{folder_of(server)}figures.json")
    figures = json.loads(content)
    assert (status, figures["runs"][0]["curves"]["rewards/mean"]) == (200, [[1, 2, 3], [0.1, 0.2, 0.3]])
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewards/mean": 0.4}\n')
    figures = json.loads(ask(server, f"{folder_of(server)}figures.json")[2])
    assert figures["runs"][0]["curves"]["rewards/mean"][0] == [1, 2, 3, 4]


def test_nothing_else_is_served(server: RunServer) -> None:
    folder = folder_of(server)
    paths = ["/", "", "/figures.json", f"{folder}metrics.jsonl", f"{folder}../figures.json", folder[:-1]]
    paths += [f"{folder}?a=b", f"{folder}plan.json", "/wrong/", "/wrong/figures.json", f"{folder}%2e%2e/plan.json"]
    for path in paths:
        status, _, content = ask(server, path)
        assert (status, b"mine" in content) == (404, False), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(server, folder, method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1"]
)
def test_another_host_name_is_refused(server: RunServer, host: str) -> None:
    assert ask(server, folder_of(server), host=host)[0] == 404


def test_a_tunnel_on_another_port_is_served(server: RunServer) -> None:
    assert ask(server, folder_of(server), host="localhost:8080")[0] == 200


def test_only_this_machine_can_connect_and_a_silent_client_delays_nobody(server: RunServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.server_port)):
        assert ask(server, folder_of(server))[0] == 200


def test_a_mistake_is_named(tmp_path: Path, server: RunServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_subcommand("watch", [str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert run_subcommand("watch", [str(tmp_path / "run"), "--port", str(server.server_port)]) == 2
    assert f"--port: {server.server_port} cannot be used" in capsys.readouterr().err
    assert run_subcommand("watch", [str(tmp_path / "run"), "--port", "99999"]) == 2


class GrowingRun(RunFiles):
    """A run that makes a step whenever it is asked, up to the third."""

    calls = 0

    def figures(self) -> dict[str, Any]:
        figures = super().figures()
        self.calls += 1
        step = min(self.calls, 3)
        figures["curves"] = {"rewards/mean": [list(range(1, step + 1)), [0.1] * step]}
        figures["samples"] = [sample for sample in figures["samples"] if sample["step"] <= step]
        figures["events"] = [{"step": step, "text": f"warning number {step}"}]
        return {**figures, "report": None}


def test_a_damaged_line_is_left_out_and_the_page_goes_on(server: RunServer, tmp_path: Path) -> None:
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"reward": 1.0}\n{"step": 4, "rewards/mean": 0.4}\n')
    for _ in range(2):
        assert ask(server, folder_of(server))[0] == 200
        (run,) = json.loads(ask(server, f"{folder_of(server)}figures.json")[2])["runs"]
        assert run["curves"]["rewards/mean"][0] == [1, 2, 3, 4]
        assert run["left_out"] == ["metrics.jsonl: line 5 is damaged or incomplete, and left out"]


def test_a_damaged_file_is_named_until_it_is_mended(
    server: RunServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "run" / "plan.json"
    text = plan.read_text()
    plan.write_text("[]")
    message = (
        f"{plan}: expected an object, found [].\n  Fix: restore it from a copy, or give the folder of another run."
    )
    for path in ("", "figures.json"):
        status, headers, content = ask(server, folder_of(server) + path)
        assert (status, headers["Content-Type"], content) == (500, "text/plain; charset=utf-8", message.encode())
    assert run_subcommand("watch", [str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"FileError: {message}\n"
    plan.write_text(text)
    assert ask(server, folder_of(server))[0] == 200


class StillRun(RunFiles):
    """A run that changes nothing, whose folder has a lock that nobody holds."""

    has_report = True

    def figures(self) -> dict[str, Any]:
        figures = {**super().figures(), "is_running": False}
        return figures if self.has_report else {**figures, "report": None}


def dump_page(server: RunServer, folder: Path) -> str:
    """Return the page as a browser draws it, some seconds after it has been opened."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}")
    # The clock of the page runs as fast as the page allows.
    command = [str(BROWSER), *options, "--virtual-time-budget=20000", "--dump-dom", server.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder).stdout


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("has_report", "live"), [(True, "Finished."), (False, r"No process writes here: last metrics \d+ seconds ago\.")]
)
def test_a_browser_shows_that_a_run_has_ended(tmp_path: Path, has_report: bool, live: str) -> None:
    run = StillRun(write_run(tmp_path / "run"))
    run.has_report = has_report
    with served(run) as server:
        page = dump_page(server, tmp_path)
    assert re.search(rf'id="live">{live}</p>', page)


@pytest.mark.slow
@needs_browser
def test_a_browser_follows_the_run(tmp_path: Path) -> None:
    run = GrowingRun(write_run(tmp_path / "run"))
    with served(run) as server:
        page = dump_page(server, tmp_path)
    assert run.calls >= 4, "the page, and new figures three times"
    assert "3 of 3" in page
    assert "warning number 3" in page
    assert "warning number 2" not in page
    assert "&lt;b&gt;best&lt;/b&gt; 3" in page, "the samples of the last step"
    assert len(re.findall("<canvas", page)) == 1, "one chart, into which each answer is drawn"
    assert re.search(r"Live: last metrics \d+ seconds ago", page)
