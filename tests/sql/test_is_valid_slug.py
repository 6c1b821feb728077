"""pgflow.is_valid_slug (sql-contract 2.1, the stricter rule)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize(
    "slug", ["a", "Z", "a1", "a_b", "A_b_9", "camelCase", "run1", "a_run", "Run", "RUN", "a" * 128]
)
def test_accepts(engine: Engine, slug: str) -> None:
    assert engine.value("select pgflow.is_valid_slug(%s)", slug) is True


@pytest.mark.parametrize(
    "slug",
    [
        None,
        "",
        "run",
        "a" * 129,
        "1a",
        "_a",
        "a_",
        "_",
        "a__b",
        "a-b",
        "a.b",
        "a b",
        " a",
        "a\n",
        "\na",
        "a\nb",
        "é",
        "aé",
    ],
)
def test_rejects(engine: Engine, slug: str | None) -> None:
    assert engine.value("select pgflow.is_valid_slug(%s)", slug) is False
