"""pgflow.is_local (sql-contract 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine

SECRET = "super-secret-jwt-token-with-at-least-32-characters-long"


def test_is_false_where_the_setting_does_not_exist(engine: Engine) -> None:
    assert engine.value("select pgflow.is_local()") is False


@pytest.mark.parametrize(
    ("secret", "local"), [(SECRET, True), ("", False), (SECRET.upper(), False), (SECRET + " ", False), ("x", False)]
)
def test_is_true_only_with_the_well_known_secret(engine: Engine, secret: str, local: bool) -> None:
    engine.execute("select set_config('app.settings.jwt_secret', %s, false)", secret)
    assert engine.value("select pgflow.is_local()") is local
