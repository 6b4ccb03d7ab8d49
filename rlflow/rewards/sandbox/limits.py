"""What a program in the sandbox may use."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    timeout_s: float
    memory_mib: int = 1024
    """Of address space, for each process, and of memory, for all of them together."""
    num_processes: int = 32
    """Threads count as processes."""
    file_mib: int = 16
    """Of each file, and so of the output."""
    disk_mib: int = 64
    """Of all files together."""
    num_files: int = 64
    """That one process has open; and a fourth of those that there may be."""
