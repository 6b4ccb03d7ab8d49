"""Writes a page about one run, or several beside each other: ``rlflow report RUN... [--output FILE]``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlflow.report.page import build_page
from rlflow.report.run_figures import RunFiles
from rlflow.report.run_page import PAGE, TEMPLATE, page_figures
from rlflow.system.text_files import replace_text


def main(arguments: Sequence[str]) -> int:
    """Write the page, and print where and which lines of files it leaves out; return the exit code."""
    parser = argparse.ArgumentParser("rlflow report", description="Write a page about runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, outputs/DATE/TIME")
    parser.add_argument("--output", type=Path, help=f"the file to write, by default {PAGE} in the (first) folder")
    options = parser.parse_args(arguments)
    figures = page_figures([RunFiles(folder) for folder in options.runs])
    for run in figures["runs"]:
        for text in run["left_out"]:
            print(f"{run['folder']}/{text}.", file=sys.stderr)
    output = options.output or options.runs[0] / PAGE
    replace_text(output, build_page(TEMPLATE, figures))
    print(output)
    return 0
