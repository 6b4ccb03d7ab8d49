"""Arguments of the form ``key=value`` in a shell script."""

import re
from collections.abc import Mapping
from typing import Any

# A value as a shell reads it.
_WORD = r"""\"[^\"]*\"|'[^']*'|\$\(\([^)]*\)\)|\S+"""


def read_arguments(script: str) -> dict[str, Any]:
    """Return the arguments with a dot in their names, with the script's own variables filled in."""
    text = "\n".join(line for line in script.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    variables = {
        name: value.strip("\"'") for name, value in re.findall(rf"^\s*(?:export )?(\w+)=({_WORD})", text, re.M)
    }
    found = re.findall(rf"""(?<!\S)["']?\+{{0,2}}([a-z_]\w*(?:\.\w+)+)=({_WORD})""", text)
    return {key: _value(_filled_in(value.strip("\"'"), variables)) for key, value in found}


def _filled_in(value: str, variables: Mapping[str, str], depth: int = 8) -> str:
    """Replace ``$name``, ``${name}``, ``${name:-default}`` and products in ``$((...))``; others stay."""

    def variable(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        # Scripts write x=${x:-1} for a variable that the shell may have.
        if name in variables and variables[name] != found[0]:
            return variables[name]
        return found[0] if default is None else default

    def product(found: re.Match[str]) -> str:
        factors = re.findall(r"\d+", found[1])
        result = 1
        for factor in factors:
            result *= int(factor)
        return str(result)

    for _ in range(depth):
        before, value = value, re.sub(r"\$\{(\w+)(?::-([^{}]*))?\}|\$(\w+)", variable, value)
        value = re.sub(r"\$\(\(([\d\s*()]+)\)\)", product, value.strip("\"'"))
        if value == before:
            break
    return value


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    # YAML needs a point in 1e-6.
    number = re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text)
    if number:
        return float(text) if number[1] or number[2] else int(text)
    return text
