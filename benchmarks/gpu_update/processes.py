"""The processes of the comparison: each system has one of its own, with a deadline."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_update.worker import MARK, Request, Result

ROOT = Path(__file__).resolve().parents[2]
# A worker that goes on for so long after its deadline is ended.
_GRACE_S = 20.0
PARTS_S = 75.0


def environment() -> dict[str, str]:
    """Return the environment of every system: the same allocator and caches, and no downloads."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    return {
        **os.environ,
        "PYTHONPATH": ":".join(path),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


@dataclass(frozen=True, eq=False)
class Waiting:
    """A worker that has been started. It does nothing on the GPU before it is told to."""

    request: Request
    process: "subprocess.Popen[str]"
    log: Path

    @classmethod
    def start(cls, request: Request, out: Path) -> "Waiting":
        log = out / f"{request.model}_{request.arm}.log"
        command = [sys.executable, "-m", "benchmarks.gpu_update.worker", json.dumps(asdict(request))]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        return cls(request, process, log)

    def results(self, seconds: float) -> Iterator[Result]:
        """Let the worker begin, and yield its results; end it after ``seconds``. Never raises."""
        reported: list[Result] = []
        problem = "no time was left"
        deadline = time.monotonic() + seconds
        try:
            for text in _lines(self.process, deadline):
                if text == "ready":
                    assert self.process.stdin is not None
                    self.process.stdin.write("go\n")
                    self.process.stdin.flush()
                elif text.startswith(MARK):
                    reported.append(Result(**json.loads(text.removeprefix(MARK))))
                    yield reported[-1]
            if seconds > 0:
                code = self.process.poll()
                problem = f"exit code {code}: {self._last_line()}" if code else f"stopped after {seconds:.0f} s"
        finally:
            self.process.kill()
            with self.process:  # closes its pipes, and waits for it
                pass
        done = {result.data for result in reported}
        if "" not in done:
            for data in self.request.data:
                if data not in done:
                    yield Result(arm=self.request.arm, model=self.request.model, data=data, error=problem)

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _lines(process: "subprocess.Popen[str]", deadline: float) -> Iterator[str]:
    """Yield the lines that a process prints, until it ends or the deadline has passed."""
    assert process.stdout is not None
    stream: IO[str] = process.stdout
    os.set_blocking(stream.fileno(), False)
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            if not selector.select(remaining):
                return
            data = os.read(stream.fileno(), 2**20).decode(errors="replace")
            if not data:
                process.wait(timeout=_GRACE_S)
                return
            *complete, pending = (pending + data).split("\n")
            yield from complete


def save_models(folder: Path, models: Sequence[str], device: str) -> None:
    """Write the weights of these models, in a process that leaves the GPU's memory free."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu_update.cases import MODELS, save_model\n"
        "for name in sys.argv[3:]: save_model(Path(sys.argv[1]) / name, MODELS[name], sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), device, *models], cwd=ROOT, env=environment(), check=True)


def run_parts(device: str, out: Path) -> None:
    """Time the parts of an update; they print their lines as they come."""
    command = [sys.executable, "-m", "benchmarks.gpu_update.parts", device]
    try:
        with (out / "parts.log").open("w") as errors:
            subprocess.run(command, cwd=ROOT, env=environment(), stderr=errors, timeout=PARTS_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"parts: stopped after {PARTS_S:.0f} s", flush=True)
