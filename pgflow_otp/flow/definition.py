"""The definition of a flow as data, and the checks of every single value in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pgflow_otp.errors import FlowDefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLUG = re.compile(r"[a-zA-Z]([a-zA-Z0-9_]*[a-zA-Z0-9])?")
#: pgmq's limit for a queue's name; a flow's queue is its slug in lower case (sql-contract 3.2).
LONGEST_FLOW_SLUG = 47
LONGEST_STEP_SLUG = 128
#: PostgreSQL's integer, which all options are stored as.
LARGEST = 2_147_483_647

StepType: TypeAlias = Literal["single", "map"]
Mode: TypeAlias = Literal["fail", "skip", "skip-cascade"]


class _Unset:
    """The value of a pattern that was not given: None is a pattern of its own."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # There is one: a flow that was pickled has the same one afterwards.


UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a flow or a step; None means not stated."""

    max_attempts: int | None = None
    base_delay: int | None = None
    timeout: int | None = None
    start_delay: int | None = None

    def check(self, where: str) -> None:
        _number(where, "max_attempts", self.max_attempts, 1)
        _number(where, "base_delay", self.base_delay, 0)
        _number(where, "timeout", self.timeout, 1)
        _number(where, "start_delay", self.start_delay, 0)


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """One step: what it waits for, under which condition it runs, and the function that does it."""

    slug: str
    step_type: StepType
    depends_on: tuple[str, ...]
    handler: Callable[..., Any]
    #: Whether the handler takes the context as its second argument.
    takes_context: bool
    options: Options = field(default_factory=Options)
    required_pattern: Any = UNSET
    forbidden_pattern: Any = UNSET
    when_unmet: Mode = "skip"
    when_exhausted: Mode = "fail"
    #: Limits the handler process sets itself before the task, in MiB of address space and seconds of CPU.
    memory_mb: int | None = None
    cpu_seconds: int | None = None


def check_slug(where: str, slug: Any, longest: int) -> str:
    if not isinstance(slug, str):
        raise FlowDefinitionError(f"{where}: the slug is {slug!r}; it has to be a string")
    if len(slug) > longest:
        raise FlowDefinitionError(f"{where}: the slug has {len(slug)} characters; at most {longest} are possible")
    if not SLUG.fullmatch(slug) or "__" in slug:
        raise FlowDefinitionError(
            f"{where}: the slug '{slug}' is not valid; use letters, digits and single underscores, "
            f"beginning with a letter and ending with a letter or digit"
        )
    if slug == "run":
        raise FlowDefinitionError(f"{where}: the slug 'run' is reserved; choose another")
    return slug


def check_mode(where: str, option: str, mode: Any, default: Mode) -> Mode:
    if mode is None:
        return default
    accepted: dict[Any, Mode] = {
        "fail": "fail",
        "skip": "skip",
        "skip-cascade": "skip-cascade",
        "skip_cascade": "skip-cascade",
    }
    if not isinstance(mode, str) or mode not in accepted:
        raise FlowDefinitionError(f"{where}: {option} is {mode!r}; it has to be 'fail', 'skip' or 'skip-cascade'")
    return accepted[mode]


def check_pattern(where: str, option: str, pattern: Any) -> Any:
    if pattern is UNSET:
        return UNSET
    if not isinstance(pattern, dict):
        raise FlowDefinitionError(
            f"{where}: {option} is {pattern!r}; it has to be a dict, the JSON object the input must contain"
        )
    try:
        _check_json(pattern)
        text = json.dumps(pattern, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FlowDefinitionError(f"{where}: {option} is not JSON: {error}") from None
    return json.loads(text)


def _check_json(value: Any, path: str = "pattern") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} at {path} is not a string")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, str):
        if "\x00" in value:
            raise ValueError(f"the string at {path} contains NUL, which PostgreSQL cannot store")
        value.encode("utf-8")
    elif not (value is None or isinstance(value, bool | int | float)):
        raise TypeError(f"the value at {path} is a {type(value).__name__}")


def check_limit(where: str, option: str, value: Any) -> int | None:
    _number(where, option, value, 1)
    return value  # type: ignore[no-any-return]


def _number(where: str, option: str, value: Any, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise FlowDefinitionError(f"{where}: {option} is {value!r}; it has to be a whole number")
    if not least <= value <= LARGEST:
        raise FlowDefinitionError(f"{where}: {option} is {value}; it has to be at least {least} and at most {LARGEST}")


def names(slugs: Sequence[str]) -> str:
    """Return slugs as a readable list, for messages."""
    return ", ".join(f"'{s}'" for s in slugs) if slugs else "none"
