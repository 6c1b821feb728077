"""What the owner of a tree is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pgflow_otp.otp.exit_reason import ExitReason
    from pgflow_otp.otp.operation import Report

#: Where a child is: the ids from the root's child down to it.
Path: TypeAlias = tuple[str, ...]


class Hooks:
    """Every method may be left as it is."""

    def on_boot(self) -> None:
        """All static children of the root are up."""

    def on_start(self, path: Path, info: dict[str, Any]) -> None:
        """A child acknowledged its start."""

    def on_exit(self, path: Path, reason: ExitReason, info: dict[str, Any], *, requested: bool) -> None:
        """A child that had started is dead and reaped. `info` is what it had acknowledged with."""

    def on_message(self, path: Path, message: dict[str, Any]) -> None:
        """A child sent a message that is not the supervisor's own. The path () is the supervisor itself: "dump"."""

    def on_report(self, path: Path, report: Report) -> None:
        """Something worth a line in the log happened. `path` is the offender's."""

    def on_stopping(self) -> None:
        """The whole tree is about to stop."""
