"""The pure core against an independent model of OTP: random children, random events, the same trace."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.otp_model import PERIOD, STRATEGIES, Event, Model, World, kinds, scripts

from pgflow_otp.otp.child_spec import ChildSpec, Flags, SupervisorSpec
from pgflow_otp.otp.exit_reason import ExitReason
from pgflow_otp.otp.node import Node
from pgflow_otp.otp.operation import Exit, Ignored, Later, Operation, Reply, Report, Start, Started, StartFailed, Stop


def start(context: Any) -> None: ...


class Real:
    """The core, its commands carried out by the world."""

    def __init__(self, strategy: str, intensity: int, kinds: list[str], world: World) -> None:
        specs = [
            ChildSpec(id=name, start=start, restart=kind)  # type: ignore[arg-type]
            for name, kind in zip("abcd", kinds, strict=False)
        ]
        flags = Flags(strategy=strategy, intensity=intensity, period=PERIOD)  # type: ignore[arg-type]
        self.world = world
        self.node = Node(SupervisorSpec(flags=flags, children=specs), lambda: world.now)
        self.trace: list[str] = []
        self.retries: list[Operation] = []
        self.over = False
        self.drive(self.node.boot())

    def drive(self, operation: Operation) -> None:
        value: Any = None
        while True:
            try:
                command = operation.send(value)
            except StopIteration:
                return
            value = None
            if isinstance(command, Start):
                self.trace.append(f"start {command.child.spec.id}")
                failed = StartFailed(ExitReason("start_failed", info="failed"))
                value = {"ok": Started(), "ignore": Ignored(), "fail": failed}[self.world.next()]
            elif isinstance(command, Stop):
                self.trace += [f"stop {c.spec.id}" for c in command.children]
                value = [ExitReason("shutdown") for _ in command.children]
            elif isinstance(command, Report) and command.context != "progress":
                self.trace.append(f"{command.context} {command.child.spec.id}")
            elif isinstance(command, Later):
                self.retries.append(command.operation())
            elif isinstance(command, Reply):
                answer = command.answer
                text = "ok" if answer[0] == "ok" else answer[1]
                self.trace.append(f"answer {'failed' if 'failed' in text else text}")
            elif isinstance(command, Exit):
                self.trace.append("exit")
                self.over = True

    def exit(self, name: str, reason: str) -> None:
        child = self.node.find(name)
        if child is None or child.state != "running":
            return
        child.state = "undefined"
        child.unhandled_exit = ExitReason("exited", 1) if reason == "crash" else ExitReason("normal")
        self.drive(self.node.child_exited(child, child.incarnation))

    def call(self, what: str, name: str) -> None:
        if what == "start":
            self.drive(self.node.start_child(ChildSpec(id=name, start=start)))
        else:
            self.drive(getattr(self.node, f"{what}_child")(name))

    def retry(self) -> None:
        if self.retries:
            self.drive(self.retries.pop(0))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(STRATEGIES), st.integers(0, 4), kinds, scripts)
def test_the_core_decides_what_otp_decides(
    strategy: str, intensity: int, kinds: list[str], happened: list[Event]
) -> None:
    """Statements 16, 20, 32 to 39, 45 to 48, 51, 53, 56 to 60, 62 to 65, 70 to 72, 74 to 78 and 98 to 102."""
    theirs, ours = World(), World()
    model, real = Model(strategy, intensity, kinds, theirs), Real(strategy, intensity, kinds, ours)
    for what, name, reason, outcomes, seconds in happened:
        for world in (theirs, ours):
            world.now += seconds
            world.outcomes = list(outcomes)
        if what == "exit":
            kid = model.get(name)
            if kid is not None:
                model.exit(kid, reason)
            real.exit(name, reason)
        elif what == "retry":
            model.retry()
            real.retry()
        else:
            model.call(what, name)
            real.call(what, name)
        assert real.trace == model.trace
        assert [(c.spec.id, c.state) for c in real.node.children] == [(k.name, k.state) for k in model.kids]
        assert real.over == model.over
        if model.over:
            return
