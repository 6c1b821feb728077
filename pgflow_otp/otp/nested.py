"""A supervisor in a process of its own, as the child of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgflow_otp.otp.exit_reason import START_FAILED
from pgflow_otp.otp.hooks import Hooks, Path
from pgflow_otp.otp.supervisor import Supervisor

if TYPE_CHECKING:
    from pgflow_otp.otp.child import ChildContext
    from pgflow_otp.otp.child_spec import SupervisorSpec


def run_supervisor(context: ChildContext, spec: SupervisorSpec, hooks: Hooks | None = None) -> int:
    """Start function of a supervisor that runs in a process of its own.

    Use it as `ChildSpec(id=…, start=run_supervisor, args=(spec,), type="supervisor", dies_with_parent=False)`. It
    acknowledges its start when all its children are up (18), stops them in order when it is asked to or its parent dies
    (90), and gives up with exit status 70, which its parent counts as `shutdown` (132). Unlike a node inside its
    parent's process it may be killed; its children die with it then (134).

    Args:
        context: given by the supervisor above.
        spec: what it supervises.
        hooks: told what happens; runs in this process. None: start, exit and report go to the supervisor above, as
            messages `child_started`, `child_exited` and `report`.
    """
    linked = _Linked(context, hooks or _Forwarding(context))
    supervisor = Supervisor(spec, name=context.tree, hooks=linked, signals_escalate=False)

    def told() -> None:
        for message in context.channel.receive_messages():
            if message["m"] == "shutdown":
                if not supervisor.is_stopping or message.get("hurry"):
                    supervisor.stop()
            elif message["m"] == "ping":
                context.send("pong")
        if not context.channel.is_open:
            supervisor.detach(context.channel)

    def orphaned() -> None:
        supervisor.detach(context.lifeline)
        if not supervisor.is_stopping:
            supervisor.stop()

    supervisor.attach(context.channel, told)
    supervisor.attach(context.lifeline, orphaned)
    status = supervisor.run()
    result = supervisor.result
    if status == START_FAILED and result is not None:
        context.fail(result.info)
    elif result is not None and result.info:
        context.send("exit", reason=result.info)
    return status


class _Linked(Hooks):
    """Acknowledges the start; everything else is the given hooks'."""

    def __init__(self, context: ChildContext, hooks: Hooks) -> None:
        self._context = context
        self._hooks = hooks
        for name in ("on_start", "on_exit", "on_message", "on_report", "on_stopping"):
            setattr(self, name, getattr(hooks, name))

    def on_boot(self) -> None:
        self._hooks.on_boot()
        self._context.ready()


class _Forwarding(Hooks):
    """Tells the supervisor above what happens."""

    def __init__(self, context: ChildContext) -> None:
        self._context = context

    def on_start(self, path: Path, info: dict[str, Any]) -> None:
        self._context.send("child_started", path=path, info=info)

    def on_exit(self, path: Path, reason: Any, info: dict[str, Any], *, requested: bool) -> None:
        self._context.send("child_exited", path=path, reason=str(reason), requested=requested)

    def on_report(self, path: Path, report: Any) -> None:
        self._context.send("report", path=path, context=report.context, reason=report.reason)
