"""pgflow.is_valid_queue_name (sql-contract 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize("name", ["a", "run", "f__a", "1", "with-dash", "q" * 47])
def test_accepts(engine: Engine, name: str) -> None:
    assert engine.value("select pgflow.is_valid_queue_name(%s)", name) is True


@pytest.mark.parametrize("name", [None, "", "A", "fooBar", "q" * 48])
def test_rejects(engine: Engine, name: str | None) -> None:
    assert engine.value("select pgflow.is_valid_queue_name(%s)", name) is False
