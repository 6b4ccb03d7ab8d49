"""A browser for tests of pages, where one is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium")


def drawn(page: str, folder: Path, script: str = "") -> str:
    """Return the page as the browser has drawn it and a script has changed it."""
    assert BROWSER is not None
    file = folder / "page.html"
    # An error of a script becomes part of the page.
    catch = "<script>onerror = message => document.documentElement.append(`error: ${message}`);</script>"
    file.write_text(page.replace("<title>", f"{catch}<title>").replace("</html>", f"<script>{script}</script></html>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom")
    command = [BROWSER, *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    assert "error: " not in done.stdout.partition("</html>")[0].rpartition("</body>")[2]
    return done.stdout
