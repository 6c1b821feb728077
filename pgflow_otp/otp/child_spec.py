"""Child specifications and supervisor flags, and the checks of every field. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Restart: TypeAlias = Literal["permanent", "transient", "temporary"]
Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
AutoShutdown: TypeAlias = Literal["never", "any_significant", "all_significant"]
Shutdown: TypeAlias = "int | Literal['infinity', 'brutal_kill']"


class SpecError(ValueError):
    """A child specification is not valid (`start_spec`)."""


class FlagsError(ValueError):
    """A supervisor's flags are not valid (`supervisor_data`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How a supervisor treats the deaths of its children. OTP's defaults (statement 8).

    Attributes:
        strategy: one_for_one, one_for_all or rest_for_one.
        intensity: restarts allowed within the period; one more and the supervisor gives up.
        period: seconds; a sliding window.
        auto_shutdown: whether the supervisor ends when a significant child ("any_significant"), or the last of them
            ("all_significant"), has ended by itself and is not restarted (statements 112 to 119).
    """

    strategy: Strategy = "one_for_one"
    intensity: int = 1
    period: float = 5
    auto_shutdown: AutoShutdown = "never"

    def __post_init__(self) -> None:
        if self.strategy not in ("one_for_one", "one_for_all", "rest_for_one"):
            raise FlagsError(f"invalid strategy: {self.strategy!r}")
        if not _is_whole(self.intensity) or self.intensity < 0:
            raise FlagsError(f"invalid intensity: {self.intensity!r} (a whole number from 0)")
        if not _is_duration(self.period):
            raise FlagsError(f"invalid period: {self.period!r} (seconds, more than 0)")
        if self.auto_shutdown not in ("never", "any_significant", "all_significant"):
            raise FlagsError(f"invalid auto_shutdown: {self.auto_shutdown!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """A supervisor: its flags and its static children, or a dynamic one, whose children come and go at run time.

    A dynamic supervisor is one_for_one, starts empty, and stops its children all at once (statements 120 to 123).

    Attributes:
        flags: how it treats deaths.
        children: its static children, in the order of their start.
        dynamic: whether it is a dynamic one.
        max_children: how many children a dynamic one may have, running or about to be restarted. None: any number.
        extra_args: arguments that every child's start function gets before its own.

    Raises:
        FlagsError: fields that do not go together.
        SpecError: a child's specification is not valid.
    """

    flags: Flags = field(default_factory=Flags)
    children: Sequence[ChildSpec] = ()
    dynamic: bool = False
    max_children: int | None = None
    extra_args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.flags, Flags):
            raise FlagsError(f"invalid flags: {self.flags!r}")
        check_child_specs(self.children, self.flags.auto_shutdown)
        if not isinstance(self.extra_args, tuple):
            raise FlagsError(f"invalid extra_args: {self.extra_args!r} (a tuple)")
        if self.max_children is not None and (not _is_whole(self.max_children) or self.max_children < 0):
            raise FlagsError(f"invalid max_children: {self.max_children!r} (a whole number from 0)")
        if self.max_children is not None and not self.dynamic:
            raise FlagsError("max_children is for dynamic supervisors")
        if self.dynamic and (self.children or self.flags.strategy != "one_for_one"):
            raise FlagsError("a dynamic supervisor is one_for_one and starts without children")
        if self.dynamic and self.flags.auto_shutdown != "never":
            raise FlagsError("a dynamic supervisor has no significant children: auto_shutdown has to be 'never'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One child of a supervisor (statements 1 to 5).

    Attributes:
        id: name, unique within the supervisor.
        start: function run in the forked process as `start(context, *args)`, or a SupervisorSpec: a supervisor node
            that lives inside its parent's process.
        args: further arguments of `start`.
        restart: permanent (always restarted), transient (after an abnormal exit), temporary (never).
        shutdown: milliseconds from the request to the kill, "infinity", or "brutal_kill". None: 5000 for a worker,
            "infinity" for a supervisor.
        type: "worker" or "supervisor".
        significant: whether its end may end the supervisor (see Flags.auto_shutdown). Never of a permanent child.
        watchdog: seconds of its own running time after which a child that does not answer pings is taken for wedged:
            SIGABRT, which writes its stack to standard error, SIGKILL, restart. None: it is never asked.
        start_timeout: seconds until a child that has not acknowledged its start is killed. None: no limit.
        dies_with_parent: whether the kernel kills the child when its parent dies (Linux). A child that has to clean
            up watches its lifeline instead.
    """

    id: str
    start: Callable[..., Any] | SupervisorSpec
    args: tuple[Any, ...] = ()
    restart: Restart = "permanent"
    shutdown: Shutdown | None = None
    type: Literal["worker", "supervisor"] = "worker"
    significant: bool = False
    start_timeout: float | None = 30.0
    watchdog: float | None = None
    dies_with_parent: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise SpecError(f"invalid child id: {self.id!r}")
        if not callable(self.start) and not isinstance(self.start, SupervisorSpec):
            raise self._invalid("start", self.start)
        if isinstance(self.start, SupervisorSpec) and self.type != "supervisor":
            raise self._invalid("type", self.type)
        if not isinstance(self.args, tuple):
            raise self._invalid("args", self.args)
        if self.restart not in ("permanent", "transient", "temporary"):
            raise self._invalid("restart", self.restart)
        if self.type not in ("worker", "supervisor"):
            raise self._invalid("type", self.type)
        if self.shutdown is None:
            object.__setattr__(self, "shutdown", 5000 if self.type == "worker" else "infinity")
        elif isinstance(self.shutdown, str):
            if self.shutdown not in ("infinity", "brutal_kill"):
                raise self._invalid("shutdown", self.shutdown)
        elif not _is_whole(self.shutdown) or self.shutdown < 0:
            raise self._invalid("shutdown", self.shutdown)
        if not isinstance(self.significant, bool):
            raise self._invalid("significant", self.significant)
        if self.significant and self.restart == "permanent":
            raise SpecError(f"child '{self.id}': a permanent child cannot be significant: it never ends for good")
        for name in ("start_timeout", "watchdog"):
            value = getattr(self, name)
            if value is not None and not _is_duration(value):
                raise self._invalid(name, value)
        if not isinstance(self.dies_with_parent, bool):
            raise self._invalid("dies_with_parent", self.dies_with_parent)

    def _invalid(self, name: str, value: Any) -> SpecError:
        return SpecError(f"child '{self.id}': invalid {name}: {value!r}")


def check_child_specs(specs: Sequence[ChildSpec], auto_shutdown: AutoShutdown | None = None) -> None:
    """Check a list of specifications as a whole (statements 6, 7 and 12).

    Args:
        specs: the children of one supervisor.
        auto_shutdown: the supervisor's flag, which they have to go with; None: whatever it is.

    Raises:
        SpecError: it is no list, something in it is no ChildSpec, two have the same id, or one is significant to a
            supervisor that never shuts itself down.
    """
    if not isinstance(specs, list | tuple):
        raise SpecError(f"not a list of child specs: {specs!r}")
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, ChildSpec):
            raise SpecError(f"not a ChildSpec: {spec!r}")
        if spec.id in seen:
            raise SpecError(f"duplicate child id: {spec.id!r}")
        seen.add(spec.id)
        check_significance(spec, auto_shutdown)


def check_significance(spec: ChildSpec, auto_shutdown: AutoShutdown | None) -> None:
    """Check that a child is significant only where that can mean something (statement 11).

    Raises:
        SpecError: it is significant, and the supervisor never shuts itself down.
    """
    if spec.significant and auto_shutdown == "never":
        raise SpecError(f"child '{spec.id}': significant, but auto_shutdown of its supervisor is 'never'")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
