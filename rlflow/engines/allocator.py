"""The settings of torch's allocator of GPU memory: who uses expandable segments, and when.

Expandable segments keep memory from fragmenting where micro-batches differ in size. Other processes cannot open such
memory by plain CUDA IPC, and vLLM's sleep mode has an allocator of its own that does not go with them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# The first that is set counts for torch. vLLM looks in another order, so only the last is left where one is written.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = "expandable_segments"


def expand_segments(device: str) -> None:
    """Turn expandable segments on for this process, unless its environment says otherwise.

    Must be called before torch's first allocation on a GPU.
    """
    settings = _from_environment()
    if device != "cpu" and _OPTION not in settings:
        _write(with_expandable_segments(settings, True))


def never_expand_segments() -> None:
    """Turn expandable segments off for this process and those that it starts, even if its environment asks for them."""
    settings = _from_environment()
    if _OPTION in settings:
        _write(with_expandable_segments(settings, False))


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Take new GPU memory in segments that other processes can open."""
    import torch

    before: str = torch._C._accelerator_getAllocatorSettings()
    if _OPTION not in before:
        yield
        return
    # torch resets every option that a new text does not name.
    torch._C._accelerator_setAllocatorSettings(with_expandable_segments(before, False))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def with_expandable_segments(settings: str, enabled: bool) -> str:
    """Return the settings with this one changed and all others as they are."""
    others = [each for each in settings.split(",") if each and each.partition(":")[0].strip() != _OPTION]
    return ",".join([*others, f"{_OPTION}:{enabled}"])


def _from_environment() -> str:
    return next((value for name in VARIABLES if (value := os.environ.get(name))), "")


def _write(settings: str) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ[VARIABLES[-1]] = settings
