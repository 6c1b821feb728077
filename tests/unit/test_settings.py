"""Settings: ranges, sources, and errors that name the setting and the value."""

from __future__ import annotations

from typing import Any

import pytest

from pgflow_otp.db.dsn import check_dsn, find_dsn, safe_dsn
from pgflow_otp.errors import ConfigurationError
from pgflow_otp.settings import Settings, settings_from


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_concurrency": 0}, "'max_concurrency' is 0"),
        ({"max_concurrency": True}, "'max_concurrency' is True"),
        ({"batch_size": "x"}, "'batch_size' is 'x'"),
        ({"heartbeat_interval": 21}, "'heartbeat_interval' is 21"),
        ({"min_poll_interval": 9, "max_poll_interval": 3}, "at most max_poll_interval (3)"),
        ({"kill_grace": -1}, "'kill_grace' is -1"),
        ({"log_level": "loud"}, "'log_level' is 'loud'"),
        ({"worker_options": {"f": {"speed": 1}}}, "unknown option 'speed'"),
        ({"worker_options": {"f": {"batch_size": 0}}}, "worker_options['f'].batch_size"),
        ({"worker_options": 3}, "a mapping"),
        ({"max_tasks_per_process": 0}, "'max_tasks_per_process' is 0"),
        ({"speed": 1}, "unknown setting 'speed'"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings_from(given, {})
    assert words in str(caught.value)


def test_arguments_win_over_variables_and_those_over_defaults() -> None:
    environment = {"PGFLOW_MAX_CONCURRENCY": "4", "PGFLOW_DRAIN_TIMEOUT": "2.5"}
    assert settings_from({}, environment).max_concurrency == 4
    assert settings_from({}, environment).drain_timeout == 2.5
    assert settings_from({"max_concurrency": 7}, environment).max_concurrency == 7
    assert settings_from({"max_concurrency": None}, {}).max_concurrency == 10


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigurationError, match="PGFLOW_BATCH_SIZE='many'"):
        settings_from({}, {"PGFLOW_BATCH_SIZE": "many"})


def test_worker_options_override_one_flow() -> None:
    settings = Settings(worker_options={"a": {"max_concurrency": 2}})
    assert settings.for_flow("a").max_concurrency == 2
    assert settings.for_flow("b").max_concurrency == 10
    assert Settings(**settings.as_json()) == settings


def test_the_dsn_comes_from_argument_then_variables_then_nowhere() -> None:
    environment = {"PGFLOW_DSN": "dbname=p", "DATABASE_URL": "postgresql:///d", "PGHOST": "h"}
    assert "dbname=a" in str(find_dsn("dbname=a", environment))
    assert "dbname=p" in str(find_dsn(None, environment))
    del environment["PGFLOW_DSN"]
    assert "dbname=d" in str(find_dsn(None, environment))
    del environment["DATABASE_URL"]
    assert find_dsn(None, environment) == ""
    assert find_dsn(None, {}) is None


def test_a_dsn_that_cannot_be_read_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_dsn("postgresql://u:secret@h:x y/db", "--dsn")
    assert "secret" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in safe_dsn("postgresql://u:secret@h/db")
