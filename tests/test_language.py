"""The project speaks plain English: the part of it that can be checked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
WORDS_IN_A_PARAGRAPH = 90
LINES_OF_README = 250
# Words of fragments. A docstring's first line is a full statement; for a function it starts with a verb.
FRAGMENTS = (
    "Of That Those These This As Likewise Whether What Where When Which Who How Why In On By For From To With Without "
    "Between It Its There Is Are Has Not No Only If"
)
# Beginnings of comments and docstrings that are no sentences, in tests too.
FRAGMENT = re.compile(r'^ *(?:# |""")(?:Of|What|Which|Whether|Whoever|Also|Likewise|Or|And)\b.*', re.MULTILINE)
VERBS = set((ROOT / "tests" / "verbs.txt").read_text().split())
"""Verbs in the imperative that docstrings of functions start with. Add the plain ones that are missing."""
REFUSED = {
    r"nursery": "fork server, worker processes",
    r"in the mean": "on average",
    r"puts? off": "preempt, delay",
    r"begun(?!\.npz)": "partial, started",
    r"handover": "migration, transfer",
    r"nought": "zero",
    r"likewise": "the same",
    r"small ones": "other",
    r"(go|goes|gone|went) on with": "resume, continue",
    r"are to be": "must be",
    r"(has|have) (never|not) run on (a GPU|GPUs)": "nothing: the README has one sentence about that",
    r"parked": "offloaded, idle",
}

ANY_REFUSED = re.compile(rf"\b(?:{'|'.join(REFUSED)})\b", re.IGNORECASE)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a page, without code, tables, lists and headings."""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        lines = [line for line in block.strip().splitlines() if not line.startswith(("|", "#"))]
        if lines and not re.match(r"[-*>] |\d+\. ", lines[0]):
            yield " ".join(lines)


def refused(text: str) -> list[str]:
    """Return the refused words of ``text``, each with the words to use."""
    return [
        f"{match[0]} (say: {instead})"
        for match in ANY_REFUSED.finditer(text)
        for pattern, instead in REFUSED.items()
        if re.fullmatch(pattern, match[0], re.IGNORECASE)
    ]


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module with its functions and classes, without a look into expressions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(child)


def fault(docstring: str, is_function: bool) -> str | None:
    """Return what is wrong with the first line of a docstring, or None."""
    first = docstring.splitlines()[0]
    word = first.split()[0].strip('.,:;`"()')
    if word in FRAGMENTS.split():
        return "starts like a fragment"
    if is_function and word not in VERBS:
        return "does not start with a verb of tests/verbs.txt"
    return None


def test_paragraphs_are_short() -> None:
    long = [
        f"{page.name}: {text}"
        for page in PAGES
        for text in paragraphs(page.read_text())
        if len(text.split()) > WORDS_IN_A_PARAGRAPH
    ]
    assert long == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES_OF_README


def test_pages_use_plain_words() -> None:
    texts = {page: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES}
    assert [f"{page.name}: {line}" for page, text in texts.items() for line in refused(text)] == []


def test_docstrings_are_statements() -> None:
    """The docstring of a test may state a fact, and is left out."""
    found = []
    for path in sources("rlflow", "benchmarks", "tests"):
        for node in definitions(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                docstring = None if getattr(node, "name", "").startswith("test_") else ast.get_docstring(node)
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if docstring and (wrong := fault(docstring, is_function)):
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {wrong}: {docstring[:80]}")
    assert found == []


def test_comments_and_docstrings_are_sentences() -> None:
    fragments = {path: FRAGMENT.findall(path.read_text()) for path in sources("rlflow", "benchmarks", "tests")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in fragments.items() if lines} == {}


def test_sources_use_plain_words() -> None:
    words = {path: refused(path.read_text()) for path in sources("rlflow", "benchmarks")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in words.items() if lines} == {}
