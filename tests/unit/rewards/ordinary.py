"""Attacks as whoever starts it runs them: ``python -m tests.unit.rewards.ordinary NAME ...`` prints each reward."""

import json
import sys

from rlflow.rewards.functions.code import prepare, reward
from tests.unit.rewards.attacks import ATTACKS

TIMEOUT_S = 2.0

if __name__ == "__main__":
    prepare()
    for attack in ATTACKS:
        if attack.name in sys.argv[1:]:
            tests = [{"input": "", "output": "secret"}]
            (given,) = reward([f"```python\n{attack.program}\n```"], [{"tests": tests}], timeout_s=TIMEOUT_S)
            print(json.dumps([attack.name, given if isinstance(given, float) else str(given)]), flush=True)
