"""``python -m rlflow.doctor.checks MODULE:FUNCTION DEVICE OPTIONS``: run one check, print its measurements as JSON."""

import json
import os
import sys
import traceback
from dataclasses import asdict
from importlib import import_module


def main() -> None:
    """Run the check that the command line names; its last line on standard output is the result."""
    target, device, options = sys.argv[1:]
    module, function = target.split(":")
    code = 0
    try:
        measurements = getattr(import_module(f"rlflow.doctor.checks.{module}"), function)(device, **json.loads(options))
        print("\n" + json.dumps([asdict(each) for each in measurements]), flush=True)
    except Exception as error:  # whatever a library raises is the finding
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", file=sys.stderr)
        code = 1
    # Libraries may leave threads that do not end.
    os._exit(code)


if __name__ == "__main__":
    main()
