"""Ways to damage a checkpoint."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rlflow.runtime.checkpoint import checkpoint_step


def damages(draw: random.Random, every: int) -> Iterator[Callable[[Path], None]]:
    """Yield ways to damage the newest of two checkpoints in a folder, which are ``every`` steps apart."""

    def any_file(newest: Path) -> Path:
        return draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))

    def flip_bit(newest: Path) -> None:
        file = any_file(newest)
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)

    def truncate_file(newest: Path) -> None:
        file = any_file(newest)
        os.truncate(file, draw.randrange(file.stat().st_size))

    def delete_file(newest: Path) -> None:
        any_file(newest).unlink()

    def mix_checkpoints(newest: Path) -> None:
        """Replace a file by that of the checkpoint before."""
        before = newest.with_name(f"step-{checkpoint_step(newest) - every:06d}")
        states = [f"actor/{kind}-00000-00000.safetensors" for kind in ("weights", "exp_avg")]
        file = newest / draw.choice(["manifest.json", *states])
        shutil.copy(before / file.relative_to(newest), file)

    def empty_checkpoint(newest: Path) -> None:
        """Delete all files of the checkpoint, and leave pointers to checkpoints that do not exist."""
        (newest.parent / "latest").write_text("step-000099")
        (newest.parent / "last").symlink_to("step-000002")
        shutil.rmtree(newest)
        newest.mkdir()

    yield from (flip_bit, truncate_file, delete_file, mix_checkpoints, empty_checkpoint)
