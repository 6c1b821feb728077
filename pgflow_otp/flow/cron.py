"""Cron schedules: what a flow may carry, checked when it is declared."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo

from pgflow_otp.errors import FlowDefinitionError

MACROS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_FIELDS = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    ("day of week", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)
_ITEM = re.compile(r"(\*|[a-z0-9]+(?:-[a-z0-9]+)?)(?:/(\d+))?")


@dataclass(frozen=True, slots=True)
class Cron:
    """When a flow starts by itself, and with which input.

    Args:
        schedule: five cron fields (minute, hour, day of month, month, day of week) or a macro such as `@hourly`.
        input: the input of each run; any JSON value; `{}` when left out.
        timezone: name of the zone in which the schedule is read; "UTC" by default.

    Raises:
        FlowDefinitionError: the schedule, the zone or the input is not valid; names the value.
    """

    schedule: str
    input: Any = field(default=None, kw_only=True)
    timezone: str = field(default="UTC", kw_only=True)

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, TypeError, OSError):
            raise FlowDefinitionError(f"cron timezone {self.timezone!r} is unknown; use a name as in 'UTC'") from None
        if self.input is None:
            object.__setattr__(self, "input", {})
        try:
            json.dumps(self.input, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FlowDefinitionError(f"cron input is not JSON: {error}") from None


def check_schedule(schedule: Any) -> None:
    if not isinstance(schedule, str):
        raise FlowDefinitionError(f"cron schedule is {schedule!r}; it has to be a string such as '0 9 * * *'")
    if schedule.startswith("@"):
        if schedule not in MACROS:
            raise FlowDefinitionError(f"cron schedule '{schedule}' is unknown; macros are {', '.join(MACROS)}")
        return
    parts = schedule.split()
    if len(parts) != len(_FIELDS):
        raise FlowDefinitionError(
            f"cron schedule '{schedule}' has {len(parts)} fields; it has to have five: "
            "minute, hour, day of month, month, day of week"
        )
    for text, (name, least, most, words) in zip(parts, _FIELDS, strict=True):
        if not all(_valid(item, least, most, words) for item in text.lower().split(",")):
            raise FlowDefinitionError(
                f"cron schedule '{schedule}': the {name} '{text}' is not valid; use {least} to {most}, "
                "*, ranges (1-5), lists (1,2) and steps (*/10)"
            )


def _valid(item: str, least: int, most: int, words: tuple[str, ...]) -> bool:
    found = _ITEM.fullmatch(item)
    if not found or (found[2] is not None and int(found[2]) == 0):
        return False
    if found[1] == "*":
        return True
    bounds = [_value(word, least, words) for word in found[1].split("-")]
    return all(b is not None and least <= b <= most for b in bounds) and bounds == sorted(bounds, key=lambda b: b or 0)


def _value(word: str, least: int, words: tuple[str, ...]) -> int | None:
    if word in words:
        return words.index(word) + least
    return int(word) if word.isdigit() else None
