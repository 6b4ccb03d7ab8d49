"""docs/environments.md is true: its class works."""

import importlib
import re
from pathlib import Path

import pytest

from rlflow.environments.base import load_environment
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text()
(SHOP,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_shop_sells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(SHOP.splitlines()) <= 25
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_shop.py").write_text(SHOP)
    importlib.import_module("my_shop")
    shop = load_environment("my_shop:Shop", {"price": 4})
    shop.reset({"money": "9"})
    answers = [shop.step(text) for text in ("buy buy", "buy", "no more")]
    assert [(each.text, each.done, each.reward) for each in answers] == [
        ("1 left", False, 2),
        ("too dear", False, -1.0),
        ("1 left", True, 0),
    ]
