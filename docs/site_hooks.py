"""Hooks of MkDocs: files outside of docs/ that pages link to are part of the site, and notebooks are pages.

A link such as ``../conf/algorithm/grpo.yaml`` leads to the file on GitHub and in an editor, and on the site to a copy
below ``repository/``. A notebook's page has the outputs that are stored in it.
"""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s:#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for notebooks, the files of the repository that pages link to, and those that these link to."""
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=_markdown_of(notebook)))
        files.remove(files.src_uris[notebook.name])
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        page = waiting.pop()
        for link in _LINK.findall(page.read_text()) if page.suffix == ".md" else ():
            target = (page.parent / link).resolve()
            name = _name(target)
            if name.startswith("repository/") and target.is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies."""
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    here = Path(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        name = Path(_name((source.parent / link[1]).resolve()))
        return f"]({Path(*[('..')] * len(here.parts)) / name}"

    return _LINK.sub(moved, markdown)


def _name(target: Path) -> str:
    """Return the path of a file on the site."""
    inside = target.relative_to(ROOT)
    inside = inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside
    return str(inside.relative_to("docs")) if inside.parts[0] == "docs" else f"repository/{inside}"


def _markdown_of(notebook: Path) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            html = "".join(output.get("data", {}).get("text/html", ()))
            parts.append(html or f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts)
