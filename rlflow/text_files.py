"""Text files that are replaced as one."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file that has its old text or the new one, even if this process is killed meanwhile."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
