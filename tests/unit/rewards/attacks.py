"""Programs that do what they should not, for the reward ``code``: those of attacks.txt.

Each is to write ``secret``, or to return it from a function ``f``, and stands under what is expected of it: the reward
is 1 where it is *right*, since some do their task besides. SECRET is the path of a file outside that holds ``secret``,
LEFT one of a file that is not to be there afterwards, HOME the folder of whoever runs this, PORT one that listens.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    name: str
    is_function: bool
    reward: float
    program: str


_HEAD = re.compile(r"^## (output|result) (right|wrong): (.*)\n", re.MULTILINE)
_, *_parts = _HEAD.split(Path(__file__).with_suffix(".txt").read_text())
ATTACKS = [
    Attack(name, kind == "result", float(expected == "right"), program)
    for kind, expected, name, program in zip(_parts[::4], _parts[1::4], _parts[2::4], _parts[3::4], strict=True)
]
