"""Runs the command line: ``python -m rlflow``, and ``python -m rlflow.doctor`` as ``python -m rlflow doctor``."""

import sys

from rlflow.cli import main

if __name__ == "__main__":
    assert __spec__ is not None, "run as a module"
    sys.argv[1:1] = __spec__.name.removesuffix(".__main__").split(".")[1:]
    sys.exit(main())
