"""Private names of peft."""

from typing import Any


def set_adapters_disabled(layers: list[Any], disabled: bool) -> None:
    """Disable the adapters of some layers, or enable them again.

    peft's own switch clears requires_grad of the adapters, to which DeepSpeed attaches its gradient hooks.
    """
    for layer in layers:
        layer._disable_adapters = disabled
