"""The rewards that a recipe may name, called here."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.errors import RecipeError
from rlflow.rewards.base import Failure, Outcome
from rlflow.rewards.callables import load_reward
from rlflow.rewards.functions import code, exact, math, number
from rlflow.rewards.sandbox.root import Limits
from rlflow.rewards.sandbox.run import Exit, LateSandboxError
from tests.unit.rewards import annotated
from tests.unit.rewards.sandboxes import needs_sandbox


def test_exact() -> None:
    assert exact.reward([" 12 ", "12.", "1"], [{"answer": 12}] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 1,234.", "... #### 1234", 1),
        ("3 and then 4.50", "#### 4.5", 1),
        ("it is -3", "#### 3", 0),
        ("none", "#### 3", 0),
        ("3 or 5", "#### 3", 0),
    ],
)
def test_number(text: str, answer: str, reward: float) -> None:
    assert number.reward([text], [{"answer": answer}]) == [reward]


@pytest.mark.parametrize(
    ("text", "answer", "outcome"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        ("the answer is 1/2", r"\frac{1}{2}", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{(2, 1)}", "(1,2)", 0),
        ("the answer is 71", "3 apples and so on\n#### 72", 0),
        ("the answer is 72", "3 apples and so on\n#### 72", 1),
        ("I do not know", "72", 0),
        ("", "72", 0),
        ("72", "", Failure("unreadable", "found an empty text as 'answer' of the row")),
    ],
)
def test_math(text: str, answer: str, outcome: Outcome) -> None:
    assert math.reward([text], [{"answer": answer}]) == [outcome]


@pytest.mark.parametrize("function", [exact, number, math])
@pytest.mark.parametrize(
    ("row", "found"), [({"answer": None}, "None"), ({"answer": float("nan")}, "nan"), ({"question": "1+1"}, "missing")]
)
def test_a_row_without_an_answer_is_a_failure(function: Any, row: dict[str, Any], found: str) -> None:
    """A response that says what ``str`` makes of null is not right."""
    wanted = Failure("unreadable", f"found no 'answer' in the row ({found})")
    assert function.reward(["None", "nan"], [row] * 2) == [wanted] * 2


def test_number_of_an_answer_without_one() -> None:
    wanted = Failure("unreadable", "found no number in the row's answer 'twelve'")
    assert number.reward(["12", "twelve", "3"], [{"answer": "twelve"}, {"answer": "twelve"}, {"answer": 3}]) == [
        *(wanted, wanted, 1.0)
    ]


def test_code_of_a_row_without_tests() -> None:
    with pytest.raises(ValueError, match="the row has no tests"):
        code.reward(["```\n1\n```"], [{"tests": None}], timeout_s=1.0)


def test_format() -> None:
    found = load_reward("format", {"pattern": r"(?s)<think>.*</think>.+"}, 1.0)
    assert found.call(["<think>a\nb</think>3", "<think></think>", "3", "x<think></think>3"], [{}] * 4) == [1, 0, 0, 0]


def test_length() -> None:
    found = load_reward("length", {"max_characters": 10, "buffer": 4}, 1.0)
    lengths = (0, 6, 7, 9, 10, 11, 100)
    assert found.call(["x" * length for length in lengths], [{}] * 7) == [0, 0, -0.25, -0.75, -1, -1, -1]
    assert load_reward("length", {"max_characters": 2}, 1.0).call(["xx", "xxx"], [{}] * 2) == [0, -1]


PROGRAM = "Like this:\n```python\nprint(sum(map(int, input().split())))\n```\nIt adds."
WITH_TEXT = "```text\n1 2\n```\nis read so:\n```python\nprint(3)\n```\nwhich gives\n```\n3\n```"
FUNCTION = "```\nfirst = 1\n```\n```py\ndef add(a, b):\n    return [a + b, None]\n```"


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "tests", "reward"),
    [
        (PROGRAM, [{"input": "1 2", "output": "3"}, {"input": "5 6\n", "output": "11 \n\n"}], 1),
        (PROGRAM, [{"input": "1 2", "output": "3"}, {"input": "5 6\n", "output": "12"}], 0),
        (PROGRAM, '[{"input": "1 2", "output": "3"}]', 1),
        (PROGRAM, [{"input": "1 2", "output": "3", "call": None, "arguments": None, "result": None}], 1),
        (PROGRAM, [{"input": "one two", "output": ""}], 0),
        (FUNCTION, [{"call": "add", "arguments": [1, 2], "result": [3, None]}], 1),
        (FUNCTION, [{"call": "add", "arguments": [1, 2], "result": [4, None]}], 0),
        (FUNCTION, [{"call": "sub", "arguments": [1, 2], "result": [4, None]}], 0),
        ("```python\nimport numpy\nprint(numpy.ones(2).sum())\n```", [{"input": "", "output": "2.0"}], 1),
        ("print(3)", [{"input": "", "output": "3"}], 0),
        (WITH_TEXT, [{"input": "", "output": "3"}], 1),
        ("```Python3 \r\nprint(3)\r\n```\r\n", [{"input": "", "output": "3"}], 1),
        ("```\nprint(3)\n```\n```bash\nprint(4)\n```", [{"input": "", "output": "3"}], 1),
        ("````py\n'```'\nprint(3)\n````", [{"input": "", "output": "3"}], 1),
        ("```python\nprint(3)\n", [{"input": "", "output": "3"}], 0),
    ],
)
def test_code(text: str, tests: object, reward: float) -> None:
    found = load_reward("code", {}, 60.0)  # a program may start late where many tests share the cores
    assert found.call([text], [{"tests": tests}]) == [reward]


def test_long_responses_are_graded_quickly() -> None:
    """A search that starts anew at each character would take hours."""
    began = time.process_time()
    assert not code._same_lines("\n" * 2**24 + "3", "3")
    assert code._same_lines("3" + " " * 2**24, "3\n\n")
    assert code._program("```python\n" * 10**5) is None
    assert time.process_time() - began < 10


@needs_sandbox
def test_a_sandbox_that_is_late_for_a_later_test_is_no_failure_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test leaves 0.05 s for the second one, and its sandbox has not started within that."""
    started: list[float] = []

    def run(program: str, stdin: bytes, limits: Limits) -> Exit:
        if started:
            raise LateSandboxError("the guard of the program did not start in time")
        started.append(limits.timeout_s)
        now[0] += 9.95
        return Exit("exited", 0, b"")

    now = [1000.0]
    monkeypatch.setattr(code, "run", run)
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: now[0]))
    test = {"input": "", "output": ""}
    texts, rows = ["```python\npass\n```"], [{"tests": [test, test]}]
    assert code.reward(texts, rows, timeout_s=10.0) == [0.0]
    for timeout_s in (10.0, 1.0):  # the first test had all the time there is
        now[0] += 1000.0
        (failure,) = code.reward(texts, rows, timeout_s=timeout_s)
        assert isinstance(failure, Failure)
        assert "did not start in time" in failure.reason


@needs_sandbox
def test_the_time_is_for_all_tests_of_a_row() -> None:
    found = load_reward("code", {}, 2.5)
    slow = "```python\nimport time\ntime.sleep(1)\n```"
    test = {"input": "", "output": ""}
    assert found.call([slow, slow], [{"tests": [test]}, {"tests": [test] * 3}]) == [1, 0]


def test_annotations_may_be_texts_and_defaults_lists() -> None:
    assert load_reward(f"{annotated.__name__}:good", {"factor": 3.0}, 1.0).call(["x"], [{}]) == [3.0]
    assert load_reward(f"{annotated.__name__}:good", {"words": ["b", "c"]}, 1.0).call(["x"], [{}]) == [4.0]


JUDGE = {"url": "http://judge/v1", "model": "wise"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "exat",
            {},
            "function: no reward 'exat'.\n  Known: code, environment, exact, format, judge, length, math, number, ",
        ),
        ("exact", {"patern": "a"}, "options.patern: unknown key"),
        (
            "length",
            {"max_characters": 1, "bufer": 2},
            "options.bufer: unknown key.\n  Known: buffer, max_characters.",
        ),
        ("format", {}, "options.pattern: is missing"),
        ("format", {"pattern": "(a"}, "options.pattern: '(a' is not valid: input should be a valid regular expression"),
        (
            "length",
            {"max_characters": 0},
            "options.max_characters: 0 is not valid: input should be greater than or equal to 1",
        ),
        (
            "length",
            {"max_characters": "9"},
            "options.max_characters: '9' is not valid: input should be a valid integer",
        ),
        (
            "remote",
            {"url": "localhost:80"},
            "options.url: 'localhost:80' is not valid: string should match pattern '^https?://'",
        ),
        ("code", {"timeout_s": 1}, "options.timeout_s: unknown key"),
        ("rlflow:__version__", {}, "function: 'rlflow:__version__' is not a function"),
        ("length", {"max_characters": 4, "buffer": 5}, "options.buffer: expected at most max_characters, 4, got 5"),
        ("judge", JUDGE | {"prompt": "Good?"}, "options.prompt: the judge would not see the response"),
        ("judge", JUDGE | {"prompt": "{response} {}"}, "options.prompt: '{}' names no column"),
        ("judge", JUDGE | {"prompt": "{response} {0}"}, "options.prompt: '{0}' names no column"),
        ("judge", JUDGE | {"prompt": "{response!q}"}, "options.prompt: '{response!q}' names no column"),
        ("judge", JUDGE | {"prompt": "{response"}, "options.prompt: its braces cannot be read (expected '}' before"),
        ("judge", JUDGE | {"prompt": "{response:q}"}, "options.prompt: '{response:q}' is no format of a text"),
        ("judge", JUDGE | {"prompt": "{response} {n!s:d}"}, "options.prompt: '{n!s:d}' is no format of a text"),
        (
            "judge",
            JUDGE | {"prompt": "{response}", "url": "http://judge/v1/chat/completions/"},
            "options.url: ends with /chat/completions, which is added to it.\n"
            "  Fix: leave /chat/completions out: url: http://judge/v1.",
        ),
        ("judge", JUDGE | {"prompt": "{response}", "model": ""}, "options.model: '' is not valid"),
        ("builtins:max", {}, "function: 'builtins:max': 'builtins' belongs to Python, and a recipe may only name code"),
        (f"{annotated.__name__}:of_a_thing", {}, "cannot be read (PydanticSchemaGenerationError: "),
        (f"{annotated.__name__}:of_nothing_known", {}, "cannot be read (NameError: name 'Unknown' is not defined)"),
        (
            f"{annotated.__name__}:good",
            {"factor": "2"},
            "options.factor: '2' is not valid: input should be a valid",
        ),
    ],
)
def test_mistakes(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_reward(name, options, 1.0)
    assert message in str(raised.value)


def test_a_key_in_the_place_of_its_variable_is_not_shown() -> None:
    with pytest.raises(RecipeError) as raised:
        load_reward("judge", JUDGE | {"prompt": "{response}", "api_key": "sk-proj-123"}, 1.0)
    assert raised.value.path == "options.api_key"
    assert "sk-proj" not in str(raised.value)
