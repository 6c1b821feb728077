"""Settings of a tree: one frozen object, filled from arguments, the command line's flags and PGFLOW_* variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pgflow_otp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Name of a tree that was given none.
DEFAULT_NAME = "pgflow"
#: A name becomes part of file names and titles.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
#: What one flow may override (interface, section 2).
WORKER_OPTIONS = ("max_concurrency", "batch_size", "start_method")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a tree runs. All times are seconds unless the name says otherwise.

    Attributes:
        name: name of the tree: in process titles, and for the commands that talk to it. One tree a name and host.
        max_concurrency: handlers of one flow that may run at once; 1 or more.
        batch_size: messages one claim may read; 1 or more.
        worker_options: `{slug: {"max_concurrency": …, "batch_size": …}}`, overriding the two above for one flow.
        min_poll_interval: shortest wait between two polls that found nothing.
        max_poll_interval: longest such wait, at most 300.
        heartbeat_interval: how often a worker says it is alive, at most 20 (it counts as healthy for 30).
        recovery_interval: how often stalled tasks are swept.
        stale_threshold: how long past its own timeout a task counts as stalled.
        drain_timeout: how long running handlers may finish at shutdown.
        kill_grace: from SIGTERM to SIGKILL of a handler.
        boot_timeout: how long importing a flow's module may take.
        idle_timeout: how long a handler process waits for its next task before it is retired.
        max_tasks_per_process: tasks after which a handler process is replaced; None: never.
        max_payload_mb: largest input or output of a handler, in MiB.
        log_level: the least severe level that is written.

    Raises:
        ConfigurationError: a value is of the wrong type or out of its range; names the setting and the value.
    """

    name: str = DEFAULT_NAME
    max_concurrency: int = 10
    batch_size: int = 10
    worker_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    min_poll_interval: float = 1.0
    max_poll_interval: float = 5.0
    heartbeat_interval: float = 10.0
    recovery_interval: float = 15.0
    stale_threshold: float = 60.0
    drain_timeout: float = 30.0
    kill_grace: float = 3.0
    boot_timeout: float = 60.0
    idle_timeout: float = 60.0
    max_tasks_per_process: int | None = None
    max_payload_mb: float = 16.0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise _invalid(
                "name", self.name, "1 to 48 letters, digits, '.', '_' or '-', beginning with a letter or digit"
            )
        _whole("max_concurrency", self.max_concurrency, 1, 10_000)
        _whole("batch_size", self.batch_size, 1, 10_000)
        _seconds("max_poll_interval", self.max_poll_interval, 0.01, 300)
        _seconds("min_poll_interval", self.min_poll_interval, 0.01, 300)
        if self.min_poll_interval > self.max_poll_interval:
            raise _invalid(
                "min_poll_interval", self.min_poll_interval, f"at most max_poll_interval ({self.max_poll_interval})"
            )
        _seconds("heartbeat_interval", self.heartbeat_interval, 0.01, 20)
        _seconds("recovery_interval", self.recovery_interval, 0.01, 3600)
        _seconds("stale_threshold", self.stale_threshold, 0.01, 86_400)
        _seconds("drain_timeout", self.drain_timeout, 0, 86_400)
        _seconds("kill_grace", self.kill_grace, 0, 3600)
        _seconds("boot_timeout", self.boot_timeout, 0.1, 3600)
        _seconds("idle_timeout", self.idle_timeout, 0.1, 86_400)
        if self.max_tasks_per_process is not None:
            _whole("max_tasks_per_process", self.max_tasks_per_process, 1, 1_000_000_000)
        _seconds("max_payload_mb", self.max_payload_mb, 0.001, 255)
        if str(self.log_level).upper() not in LOG_LEVELS:
            raise _invalid("log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        _check_worker_options(self.worker_options)

    def for_flow(self, slug: str) -> Settings:
        """Return the settings that hold for one flow: its worker_options applied."""
        options = dict(self.worker_options.get(slug, {}))
        options.pop("start_method", None)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Settings(**{**values, **options})

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `Settings(**it)` gives an equal object."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["worker_options"] = {k: dict(v) for k, v in self.worker_options.items()}
        return values


LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")


def settings_from(given: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Build settings from what was given, else from PGFLOW_* variables, else from the defaults.

    Raises:
        ConfigurationError: an unknown setting, or a value that does not fit.
    """
    environment = os.environ if environment is None else environment
    known = {f.name: f for f in fields(Settings)}
    for key in given:
        if key not in known:
            raise ConfigurationError(f"unknown setting '{key}'; known settings: {', '.join(sorted(known))}")
    values = {key: value for key, value in given.items() if value is not None}
    for key, spec in known.items():
        variable = f"PGFLOW_{key.upper()}"
        text = environment.get(variable)
        if key in values or not text or key == "worker_options":
            continue
        values[key] = _from_text(variable, text, str(spec.type))
    return Settings(**values)


def check_limits(limits: Mapping[str, Any]) -> None:
    """Check limits of a worker that are given at run time, as the settings of the same names are checked.

    Raises:
        ConfigurationError: a limit is unknown, or out of its range.
    """
    for key, value in limits.items():
        if key not in ("max_concurrency", "batch_size"):
            raise ConfigurationError(f"unknown limit '{key}'; known: max_concurrency, batch_size")
        _whole(key, value, 1, 10_000)


def _from_text(variable: str, text: str, kind: str) -> Any:
    try:
        if kind.startswith("int"):
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        raise ConfigurationError(f"{variable}='{text}' is not a number") from None
    return text


def _check_worker_options(options: Any) -> None:
    if not hasattr(options, "items"):
        raise _invalid("worker_options", options, "a mapping from flow slug to options")
    for slug, overrides in options.items():
        if not hasattr(overrides, "items"):
            raise _invalid(f"worker_options['{slug}']", overrides, "a mapping of options")
        for key, value in overrides.items():
            if key not in WORKER_OPTIONS:
                raise ConfigurationError(
                    f"worker_options['{slug}'] has the unknown option '{key}'; known: {', '.join(WORKER_OPTIONS)}"
                )
            if key == "start_method":
                if value != "fork":
                    raise _invalid(f"worker_options['{slug}'].{key}", value, "'fork'")
            else:
                _whole(f"worker_options['{slug}'].{key}", value, 1, 10_000)


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _invalid(name, value, f"a whole number from {least} to {most}")


def _seconds(name: str, value: Any, least: float, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _invalid(name, value, f"a number from {least} to {most}")


def _invalid(name: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"setting '{name}' is {value!r}; it has to be {wanted}")
