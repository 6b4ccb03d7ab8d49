"""A check whether this host allows the sandbox."""

import pytest

from rlflow.rewards.functions.code import prepare
from rlflow.rewards.sandbox.run import SandboxError

try:
    prepare()
    _missing = ""
except SandboxError as error:
    _missing = str(error)

needs_sandbox = pytest.mark.skipif(bool(_missing), reason=f"no sandbox on this host: {_missing}")
