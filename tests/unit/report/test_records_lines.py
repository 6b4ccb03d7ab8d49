"""Files of lines that a killed run has cut off, or a person has edited."""

from pathlib import Path
from typing import Any

from rlflow.report.records import MetricsWriter, read_lines, remove_lines_after

GOOD = ['{"step": 1, "a": 2}', '{"step": 2}', '{"step": 3}']
JUNK = [
    b"not json",
    b"[1, 2]",
    b"3",
    b"null",
    b'{"step": "x"}',
    b'{"no": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"step": 2',
]


def test_junk_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [line.encode() for line in GOOD]
    path.write_bytes(b"\n".join([*JUNK, lines[0], *JUNK, lines[1], *JUNK, lines[2], *JUNK]))
    assert [line["step"] for line in read_lines(path) if line.get("step") in (1, 2, 3)] == [1, 2, 3]
    remove_lines_after(path, 2)
    assert path.read_text().splitlines() == GOOD[:2]


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    remove_lines_after(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_an_evaluation_that_is_made_again_is_written_once(tmp_path: Path) -> None:
    """A run that is killed before its first checkpoint evaluates its model twice, and GPUs may give two figures."""
    plan: Any = None
    for measure in (0.25, 0.25, 0.5):
        metrics = MetricsWriter()
        metrics.started(plan, tmp_path, 0)
        metrics.measured(0, {"evaluation/reward": measure})
        metrics.stepped(1, {"loss": 2.0})
        metrics.close()
        lines = read_lines(tmp_path / "metrics.jsonl")
        assert lines == [{"step": 0, "evaluation/reward": measure}, {"step": 1, "loss": 2.0}]
