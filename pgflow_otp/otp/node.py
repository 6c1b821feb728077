"""The decisions of one supervisor. Pure: no clock, no process, no socket.

An operation (boot, the death of a child, a call, the stop) is a generator. It yields what has to be done and is sent
what came of it; operations are served one after the other in the order of arrival (105). Reading one from top to
bottom is reading what OTP does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pgflow_otp.otp.child_spec import SpecError, check_significance
from pgflow_otp.otp.exit_reason import GAVE_UP, ExitReason
from pgflow_otp.otp.intensity import RestartIntensity

if TYPE_CHECKING:
    from pgflow_otp.otp.child_spec import ChildSpec, SupervisorSpec

State: TypeAlias = Literal["undefined", "starting", "running", "stopping", "restarting"]


@dataclass(slots=True, eq=False)
class Child:
    """One child as its supervisor knows it. `handle` belongs to whoever carries out the actions."""

    spec: ChildSpec
    state: State = "undefined"
    handle: Any = None
    #: Counts starts; tells an exit of this process from a late word about an earlier one.
    incarnation: int = 0
    #: The child died by itself and its operation is still waiting in the queue (54).
    unhandled_exit: ExitReason | None = None
    restarts: int = 0


# What an operation may yield, and what it is sent back.


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child; sends back Started, Ignored or StartFailed."""

    child: Child


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop children, all at the same time; sends back their exit reasons, in order."""

    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the log what happened (136)."""

    context: Literal["start_error", "child_terminated", "shutdown_error", "shutdown", "progress"]
    child: Child
    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """Queue an operation behind the waiting ones (70)."""

    operation: Callable[[], Operation]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the call this operation serves."""

    answer: Any


@dataclass(frozen=True, slots=True)
class Booted:
    """All static children are up (18)."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The supervisor ends; nothing of it is left."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Started:
    info: Any = None


@dataclass(frozen=True, slots=True)
class Ignored:
    pass


@dataclass(frozen=True, slots=True)
class StartFailed:
    reason: ExitReason


StartOutcome: TypeAlias = Started | Ignored | StartFailed
Command: TypeAlias = Start | Stop | Report | Later | Reply | Booted | Exit
Operation: TypeAlias = Generator[Command, Any, None]


@dataclass(eq=False)
class Node:
    """The children of one supervisor in the order of their start, and what happens to them."""

    spec: SupervisorSpec
    clock: Callable[[], float]
    children: list[Child] = field(default_factory=list)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.children = [Child(spec) for spec in self.spec.children]
        self.intensity = RestartIntensity(self.spec.flags.intensity, self.spec.flags.period)

    def find(self, child_id: str) -> Child | None:
        return next((c for c in self.children if c.spec.id == child_id), None)

    # Operations

    def boot(self) -> Operation:
        """Start the children in order, each after the one before it has acknowledged (16, 17)."""
        for child in list(self.children):
            outcome = yield from self._start(child)
            if isinstance(outcome, StartFailed):
                yield Report("start_error", child, str(outcome.reason))
                yield from self._stop_all()
                info = f"failed to start child '{child.spec.id}': {outcome.reason}"
                yield Exit(ExitReason("start_failed", info=info))
                return
        yield Booted()

    def child_exited(self, child: Child, incarnation: int) -> Operation:
        """Act on a death that nobody had asked for (32 to 57)."""
        reason = child.unhandled_exit
        if reason is None or child.incarnation != incarnation:
            return  # It was taken care of meanwhile: stopped as a bystander, or deleted (44, 54).
        child.unhandled_exit = None
        if child.spec.restart == "temporary":
            self._forget(child)
            if reason.is_abnormal:
                yield Report("child_terminated", child, str(reason))
            yield from self._shut_down_after(child)
            return
        if child.spec.restart == "transient" and not reason.is_abnormal:
            yield from self._shut_down_after(child)
            return
        yield Report("child_terminated", child, str(reason))
        yield from self._restart(child)

    def stop(self, reason: ExitReason) -> Operation:
        """Stop everything in reverse order; a dynamic supervisor's children all at once (80, 122)."""
        self.is_stopping = True
        yield from self._stop_all()
        yield Exit(reason)

    def start_child(self, spec: ChildSpec) -> Operation:
        """Add a child at run time (98, 99)."""
        known = self.find(spec.id)
        if known is not None:
            running = known.state in ("starting", "running")
            yield Reply(("error", "already_started" if running else "already_present"))
            return
        try:
            check_significance(spec, self.spec.flags.auto_shutdown)
        except SpecError as error:
            yield Reply(("error", str(error)))
            return
        child = Child(spec)
        self.children.append(child)
        outcome = yield from self._start(child)
        if isinstance(outcome, StartFailed):
            self._forget(child)
            yield Reply(("error", str(outcome.reason)))
        else:
            if isinstance(outcome, Ignored) and self.spec.dynamic:
                self._forget(child)
            yield Reply(("ok", outcome.info if isinstance(outcome, Started) else None))

    def terminate_child(self, child_id: str) -> Operation:
        """Stop one child and leave it down; a child of a dynamic supervisor is forgotten (100)."""
        child = self.find(child_id)
        if child is None:
            yield Reply(("error", "not_found"))
            return
        yield from self._stop_one_by_one([child])
        if self.spec.dynamic:
            self._forget(child)
        yield Reply(("ok", None))

    def restart_child(self, child_id: str) -> Operation:
        """Start a child that is down (101)."""
        child = self.find(child_id)
        refusal = self._refusal_of_idle(child)
        if child is None or refusal is not None:
            yield Reply(("error", refusal))
            return
        outcome = yield from self._start(child)
        if isinstance(outcome, StartFailed):
            yield Reply(("error", str(outcome.reason)))
        else:
            yield Reply(("ok", outcome.info if isinstance(outcome, Started) else None))

    def delete_child(self, child_id: str) -> Operation:
        """Forget a child that is down (102)."""
        child = self.find(child_id)
        refusal = self._refusal_of_idle(child)
        if child is not None and refusal is None:
            self._forget(child)
        yield Reply(("error", refusal) if refusal is not None else ("ok", None))

    def count_children(self) -> dict[str, int]:
        """Count what is specified and what is alive (104)."""
        supervisors = sum(c.spec.type == "supervisor" for c in self.children)
        return {
            "specs": len(self.children),
            "active": sum(c.state in ("running", "stopping") for c in self.children),
            "supervisors": supervisors,
            "workers": len(self.children) - supervisors,
        }

    def retry(self, child: Child) -> Operation:
        """Try a failed restart again, unless somebody stopped the child meanwhile (70 to 77)."""
        if child.state == "restarting":
            yield from self._restart(child)

    # Their parts

    def _refusal_of_idle(self, child: Child | None) -> str | None:
        """Why a child is not one that is down; None when it is."""
        if child is None:
            return "not_found"
        if child.state == "restarting":
            return "restarting"
        # One that has died and whose turn has not come yet is still running for everybody who asks (44).
        return None if child.state == "undefined" and child.unhandled_exit is None else "running"

    def _shut_down_after(self, child: Child) -> Operation:
        """End the supervisor when this child's end was the one it lived for (112 to 118)."""
        wanted = self.spec.flags.auto_shutdown
        if not child.spec.significant or wanted == "never":
            return
        others = (c for c in self.children if c is not child and c.spec.significant)
        if wanted == "all_significant" and any(c.state != "undefined" or c.unhandled_exit for c in others):
            return
        yield from self.stop(ExitReason("shutdown", info=f"significant child '{child.spec.id}' has ended"))

    def _restart(self, child: Child) -> Operation:
        if not self.intensity.add(self.clock()):
            yield Report("shutdown", child, "reached_max_restart_intensity")
            child.state = "undefined"
            yield from self.stop(
                ExitReason("shutdown", GAVE_UP, info=f"too many restarts, the last of '{child.spec.id}'")
            )
            return
        child.restarts += 1
        strategy = self.spec.flags.strategy
        if strategy == "one_for_one":
            segment = [child]
        elif strategy == "rest_for_one":
            segment = self.children[self.children.index(child) :]
        else:
            segment = list(self.children)
        child.state = "undefined"
        yield from self._stop_one_by_one([c for c in segment if c is not child])
        for member in segment:
            if member not in self.children:
                continue  # A temporary bystander is gone for good (36).
            outcome = yield from self._start(member)
            if isinstance(outcome, StartFailed):
                yield Report("start_error", member, str(outcome.reason))
                member.state = "restarting"
                yield Later(lambda: self.retry(member))  # noqa: B023 - the loop ends here
                return
            if isinstance(outcome, Started):
                yield Report("progress", member, "restarted" if member is child else "started again")

    def _start(self, child: Child) -> Generator[Command, Any, StartOutcome]:
        child.state = "starting"
        child.incarnation += 1
        child.unhandled_exit = None
        outcome: StartOutcome = yield Start(child)
        if isinstance(outcome, Started):
            # It may have died by itself right after its acknowledgement; that is an operation of its own.
            child.state = "running" if child.unhandled_exit is None else "undefined"
        else:
            child.state = "undefined"
            if isinstance(outcome, Ignored) and child.spec.restart == "temporary":
                self._forget(child)
        return outcome

    def _stop_all(self) -> Operation:
        if self.spec.dynamic:
            yield from self._stop_together(self.children)
        else:
            yield from self._stop_one_by_one(self.children)

    def _stop_one_by_one(self, children: list[Child]) -> Operation:
        for child in reversed(list(children)):
            yield from self._stop_together([child])

    def _stop_together(self, children: list[Child]) -> Operation:
        alive = tuple(c for c in children if c.state in ("starting", "running", "stopping"))
        for child in children:
            if child not in alive:
                child.state = "undefined"
                child.unhandled_exit = None
        if alive:
            half_started = [c for c in alive if c.state == "starting"]
            for child in alive:
                child.state = "stopping"
            reasons: list[ExitReason] = yield Stop(alive)
            for child, reason in zip(alive, reasons, strict=True):
                child.state = "undefined"
                child.unhandled_exit = None
                # One that had not acknowledged its start is killed by rule (28): nothing to report.
                if not _is_clean_stop(child.spec, reason) and not (child in half_started and reason.kind == "killed"):
                    yield Report("shutdown_error", child, str(reason))
        for child in list(children):
            if child.spec.restart == "temporary":
                self._forget(child)

    def _forget(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)


def _is_clean_stop(spec: ChildSpec, reason: ExitReason) -> bool:
    """Statement 84: what an ordered stop may end with, without a report."""
    if reason.kind == "shutdown":
        return True
    if reason.kind == "normal":
        return spec.restart != "permanent"
    return reason.kind == "killed" and spec.shutdown == "brutal_kill"
