"""Chat templates come from strangers: they have neither Python, nor time, nor memory of the run's process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rlflow.data import chat_template
from rlflow.data.chat_template import TemplateError, processor_template, render_all

LOOP = "{% for x in range(99999) %}"
CONVERSATION = [{"role": "user", "content": "hi"}]


def renders(template: str) -> Callable[[Any], str]:
    def render(conversation: Any) -> str:
        return str(render_jinja_template(conversations=[conversation], chat_template=template)[0][0])

    return render


def test_texts_come_in_the_order_of_the_conversations() -> None:
    conversations = [[{"role": "user", "content": f"é\n{number}"}] for number in range(300)]
    texts = render_all(renders("<{{ messages[0].content }}>"), conversations)
    assert texts == [f"<é\n{number}>" for number in range(300)]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (f"{LOOP * 4}{'{% endfor %}' * 4}", "takes more than 0.5 s for row 0"),
        ("{{ 'x' * 4000000000 }}", "fails for row 0 (MemoryError"),
        ("{{ 'x' * 3000 }}", "fails for row 0 (3000 characters"),
        ("{{ ''.__class__.__mro__ }}", "fails for row 0 (SecurityError: "),
        ("{{ cycler.__init__.__globals__.os.system('touch owned') }}", "fails for row 0 (SecurityError: "),
        ("{{ messages.append(1) }}", "fails for row 0 (SecurityError: "),
        ("{% include '/etc/passwd' %}", "fails for row 0 (TypeError: no loader"),
        ("{{ raise_exception('no') }}", "fails for row 0 (TemplateError: no"),
        ("{{ {}[1][2] }}", "fails for row 0 (UndefinedError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails for row 0 (RecursionError: "),
    ],
)
def test_a_template_that_is_refused(
    template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    is_slow = message.startswith("takes")
    monkeypatch.setattr(chat_template, "SECONDS", 0.5 if is_slow else 60.0)
    monkeypatch.setattr(chat_template, "_MAX_CHARACTERS", 2000)
    with pytest.raises(TemplateError) as raised:
        render_all(renders(template), [CONVERSATION])
    assert str(raised.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ('{"chat_template": "{{ 1 }}"}', "{{ 1 }}"),
        ('{"chat_template": 1}', None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_the_template_of_a_processor(content: str | None, template: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "chat_template.json").write_text(content)
    assert processor_template(str(tmp_path)) == template
