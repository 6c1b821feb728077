"""pgflow.calculate_retry_delay (sql-contract 2.1)."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize(
    ("base", "attempts", "seconds"),
    [
        ("5", 0, 5),
        ("5", 1, 10),
        ("5", 2, 20),
        ("5", 3, 40),
        ("1", 30, 2**30),
        ("0", 1, 0),
        ("0", 9, 0),
        ("1.5", 1, 3),
        ("0.3", 1, 0),
        ("0.7", 2, 2),
        ("1.1", 3, 8),
    ],
)
def test_doubles_with_each_attempt_and_rounds_down(engine: Engine, base: str, attempts: int, seconds: int) -> None:
    assert engine.value("select pgflow.calculate_retry_delay(%s, %s)", Decimal(base), attempts) == seconds
