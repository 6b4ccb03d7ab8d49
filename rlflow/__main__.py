"""Runs the command line: ``python -m rlflow``."""

import sys

from rlflow.cli import main

sys.exit(main())
