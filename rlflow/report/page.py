"""Pages that are one file each and load nothing: a template with its parts and the figures that its script draws."""

import json
import re
from importlib.resources import files
from typing import Any


def build_page(template: str, figures: Any, *scripts: str) -> str:
    """Return the page of a template, a file of this folder: each ``{{name}}`` is replaced by the file of that name.

    ``{{figures}}`` is replaced by the figures as JSON. More ``scripts`` of this folder run at the end.
    """
    page = re.sub(r"\{\{(?!figures)([\w./]+)\}\}", lambda part: _read(part[1]), _read(template))
    page += "".join(f"<script>{_read(name)}</script>" for name in scripts)
    # A script element ends at the first "</", whatever its type.
    return page.replace("{{figures}}", json.dumps(figures).replace("<", "\\u003c"))


def _read(name: str) -> str:
    return files("rlflow.report").joinpath(name).read_text("utf-8")
