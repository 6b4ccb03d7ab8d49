"""The documentation builds as a site without a warning, and its pages load nothing from other hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
# Elements that make a browser fetch something.
LOADS = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\" >]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install 'rlflow[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.stem / "index.html").is_file() or page.stem == "index", page
    notebook = (site / "first-run" / "index.html").read_text()
    assert notebook.count('<img alt="rewards/mean') == 1
    assert 'href="../getting-started/"' in notebook
    assert not list(site.rglob("*.ipynb"))
    assert (site / "repository" / "benchmarks" / "RESULTS" / "index.html").is_file()
    assert (site / "repository" / "conf" / "algorithm" / "grpo.yaml").is_file()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    found = {page.name: LOADS.findall(page.read_text()) for page in pages}
    assert {name: loads for name, loads in found.items() if loads} == {}


def test_no_markdown_is_left_as_text(site: Path) -> None:
    """The dialects of Markdown differ: a misread table is a paragraph with bars, and a misread list one with dashes."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert "|---" not in text, page
        assert not re.search(r"<p>[^<]*\n[-*] ", text), page
