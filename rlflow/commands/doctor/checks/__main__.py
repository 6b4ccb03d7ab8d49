"""Runs one check, ``python -m rlflow.commands.doctor.checks MODULE:FUNCTION DEVICE OPTIONS``, and prints JSON."""

import json
import os
import sys
import traceback
from dataclasses import asdict
from importlib import import_module


def main() -> None:
    """Run the check that the command line names; print its findings as the last line."""
    target, device, options = sys.argv[1:]
    module, function = target.split(":")
    code = 0
    try:
        check = getattr(import_module(f"rlflow.commands.doctor.checks.{module}"), function)
        findings = check(device, **json.loads(options))
        print("\n" + json.dumps([asdict(finding) for finding in findings]), flush=True)
    except Exception as error:  # any error of a library is a result of the check
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", file=sys.stderr)
        code = 1
    # Exit at once, because libraries may leave threads that never end.
    os._exit(code)


if __name__ == "__main__":
    main()
