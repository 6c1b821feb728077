"""The decisions of one supervisor. Pure: no clock, no process, no socket.

An operation (boot, the death of a child, a call, the stop) is a generator. It yields what has to be done and is sent
what came of it; operations are served one after the other in the order of arrival (105). Reading one from top to
bottom is reading what OTP does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp.child_spec import ChildSpec, SpecError, check_significance
from pgflow_otp.otp.exit_reason import GAVE_UP, ExitReason
from pgflow_otp.otp.intensity import RestartIntensity
from pgflow_otp.otp.operation import (
    Booted,
    Child,
    Exit,
    Ignored,
    Later,
    Operation,
    Reply,
    Report,
    Start,
    Started,
    StartFailed,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pgflow_otp.otp.child_spec import SupervisorSpec
    from pgflow_otp.otp.operation import Command, StartOutcome


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

    def find(self, key: str | int) -> Child | None:
        """Return a child by id; one of a dynamic supervisor also by the pid of its living process (107, 108)."""
        if isinstance(key, str):
            return next((c for c in self.children if c.spec.id == key), None)
        if not self.spec.dynamic:
            return None
        return next((c for c in self.children if c.pid == key and c.state in ("running", "stopping")), None)

    def count_children(self) -> dict[str, int]:
        """Count what is specified and what is alive (104)."""
        supervisors = sum(c.spec.type == "supervisor" for c in self.children)
        return {
            "specs": len(self.children),
            "active": sum(c.state in ("running", "stopping") for c in self.children),
            "supervisors": supervisors,
            "workers": len(self.children) - supervisors,
        }

    # Operations: the life of the supervisor

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
            if isinstance(outcome, Started):
                yield Report("progress", child, "started", "INFO")
        yield Booted()

    def child_exited(self, child: Child, incarnation: int) -> Operation:
        """Act on a death that nobody had asked for (32 to 57)."""
        reason = child.unhandled_exit
        if reason is None or child.incarnation != incarnation:
            return  # It was taken care of meanwhile: stopped as a bystander, or deleted (44, 54).
        child.unhandled_exit = None
        restart = child.spec.restart
        if restart != "temporary" and (restart == "permanent" or reason.is_abnormal):
            yield Report("child_terminated", child, str(reason))
            yield from self._restart(child)
            return
        self._drop_if_ephemeral(child)
        if reason.is_abnormal:
            yield Report("child_terminated", child, str(reason))
        yield from self._shut_down_after(child)

    def retry(self, child: Child) -> Operation:
        """Try a failed restart again, unless somebody stopped the child meanwhile (70 to 77)."""
        if child.state == "restarting":
            yield from self._restart(child)

    def stop(self, reason: ExitReason) -> Operation:
        """Stop everything in reverse order; a dynamic supervisor's children all at once (80, 122)."""
        self.is_stopping = True
        yield from self._stop_all()
        yield Exit(reason)

    # Operations: administration. Every answer is ("ok", pid, info) or ("error", reason).

    def start_child(self, spec: ChildSpec) -> Operation:
        """Add a child at run time (98, 99)."""
        refusal = self._refusal_of_new(spec)
        if refusal is not None:
            yield Reply(("error", refusal))
            return
        child = Child(spec)
        self.children.append(child)
        yield from self._start_on_request(child, is_new=True)

    def terminate_child(self, key: str | int) -> Operation:
        """Stop one child and leave it down; a child of a dynamic supervisor is forgotten (100, 108)."""
        child = self.find(key)
        if child is None:
            yield Reply(("error", "not_found"))
            return
        yield from self._stop_one_by_one([child])
        if self.spec.dynamic:
            self._forget(child)
        yield Reply(("ok", None, None))

    def restart_child(self, key: str | int) -> Operation:
        """Start a child that is down (101)."""
        child = self.find(key)
        refusal = _refusal_of_idle(child)
        if child is None or refusal is not None:
            yield Reply(("error", refusal))
            return
        yield from self._start_on_request(child)

    def delete_child(self, key: str | int) -> Operation:
        """Forget a child that is down (102)."""
        child = self.find(key)
        refusal = _refusal_of_idle(child)
        if child is not None and refusal is None:
            self._forget(child)
        yield Reply(("error", refusal) if refusal is not None else ("ok", None, None))

    # Their parts

    def _refusal_of_new(self, spec: ChildSpec) -> str | None:
        known = self.find(spec.id)
        if known is not None:
            return "already_present" if known.is_down or known.state == "restarting" else "already_started"
        most = self.spec.max_children
        if most is not None and sum(not c.is_down for c in self.children) >= most:
            return "max_children"
        try:
            check_significance(spec, self.spec.flags.auto_shutdown)
        except SpecError as error:
            return str(error)
        return None

    def _start_on_request(self, child: Child, *, is_new: bool = False) -> Operation:
        outcome = yield from self._start(child)
        if isinstance(outcome, StartFailed):
            if is_new:
                self._forget(child)
            yield Reply(("error", str(outcome.reason)))
        elif isinstance(outcome, Started):
            yield Report("progress", child, "started", "DEBUG")
            yield Reply(("ok", outcome.pid, outcome.info))
        else:
            yield Reply(("ok", None, None))

    def _restart(self, child: Child) -> Operation:
        if not self.intensity.add(self.clock()):
            yield Report("shutdown", child, "reached_max_restart_intensity")
            child.state = "undefined"
            info = f"too many restarts, the last of '{child.spec.id}'"
            yield from self.stop(ExitReason("shutdown", GAVE_UP, info=info))
            return
        child.note_restart(self.clock(), self.spec.flags.period)
        segment = self._segment(child)
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
                yield Report("progress", member, "restarted" if member is child else "started again", "INFO")

    def _segment(self, child: Child) -> list[Child]:
        """Return whom the strategy restarts with a child, in the order of their start (45 to 47)."""
        strategy = self.spec.flags.strategy
        if strategy == "one_for_one":
            return [child]
        first = self.children.index(child) if strategy == "rest_for_one" else 0
        return self.children[first:]

    def _start(self, child: Child) -> Generator[Command, Any, StartOutcome]:
        child.state = "starting"
        child.incarnation += 1
        child.unhandled_exit = None
        outcome: StartOutcome = yield Start(child)
        if isinstance(outcome, Started):
            # It may have died by itself right after its acknowledgement; that is an operation of its own.
            child.state = "running" if child.unhandled_exit is None else "undefined"
            if child.spec.restart == "temporary":
                child.spec = replace(child.spec, args=())  # Nobody will need them again (37).
        else:
            child.state = "undefined"
            if isinstance(outcome, Ignored):
                self._drop_if_ephemeral(child)
        return outcome

    def _shut_down_after(self, child: Child) -> Operation:
        """End the supervisor when this child's end was the one it lived for (112 to 118)."""
        wanted = self.spec.flags.auto_shutdown
        if not child.spec.significant or wanted == "never":
            return
        others = (c for c in self.children if c is not child and c.spec.significant)
        if wanted == "all_significant" and any(not c.is_down for c in others):
            return
        yield from self.stop(ExitReason("shutdown", info=f"significant child '{child.spec.id}' has ended"))

    def _stop_all(self) -> Operation:
        if self.spec.dynamic:
            yield from self._stop_together(list(self.children))
        else:
            yield from self._stop_one_by_one(list(self.children))

    def _stop_one_by_one(self, children: list[Child]) -> Operation:
        for child in reversed(children):
            yield from self._stop_together([child])

    def _stop_together(self, children: list[Child]) -> Operation:
        alive = tuple(c for c in children if c.state in ("starting", "running", "stopping"))
        half_started = {c for c in alive if c.state == "starting"}
        # One that died by itself before its turn came counts with its own reason (52, 54, 86).
        ended = [(c, c.unhandled_exit) for c in children if c.unhandled_exit is not None and c not in alive]
        for child in alive:
            child.state = "stopping"
        if alive:
            reasons: list[ExitReason] = yield Stop(alive)
            ended += zip(alive, reasons, strict=True)
        for child in children:
            child.state, child.unhandled_exit = "undefined", None
        unclean: dict[str, list[Child]] = {}
        for child, reason in ended:
            # One that had not acknowledged its start is killed by rule (28): nothing to report.
            if not _is_clean_stop(child.spec, reason) and not (child in half_started and reason.kind == "killed"):
                unclean.setdefault(str(reason), []).append(child)
        for text, offenders in unclean.items():
            yield Report("shutdown_error", offenders[0], text, count=len(offenders))
        for child in children:
            if child.spec.restart == "temporary":
                self._forget(child)

    def _drop_if_ephemeral(self, child: Child) -> None:
        """Forget a child that is down and will not come back: a temporary one, and any of a dynamic supervisor (20, 35,
        78)."""
        if child.spec.restart == "temporary" or self.spec.dynamic:
            self._forget(child)

    def _forget(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)


def _refusal_of_idle(child: Child | None) -> str | None:
    """Say why a child is not one that is down; None when it is."""
    if child is None:
        return "not_found"
    if child.state == "restarting":
        return "restarting"
    return None if child.is_down else "running"


def _is_clean_stop(spec: ChildSpec, reason: ExitReason) -> bool:
    """Statement 84: what an ordered stop may end with, without a report."""
    if reason.kind == "shutdown":
        return True
    if reason.kind == "normal":
        return spec.restart != "permanent"
    return reason.kind == "killed" and spec.shutdown == "brutal_kill"
