"""What a supervisor decides, without any process: the operations are driven by hand."""

from __future__ import annotations

from typing import Any

from pgflow_otp.otp.child_spec import ChildSpec, Flags, Restart, Strategy, SupervisorSpec
from pgflow_otp.otp.exit_reason import ExitReason
from pgflow_otp.otp.node import Node
from pgflow_otp.otp.operation import (
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
from pgflow_otp.otp.runner import Runner

CRASH = ExitReason("exited", 1)
ASKED = ExitReason("shutdown")


def start(context: Any) -> None: ...


def node(strategy: Strategy, *restarts: Restart, intensity: int = 3) -> Node:
    specs = [ChildSpec(id=f"c{i}", start=start, restart=r) for i, r in enumerate(restarts, 1)]
    made = Node(SupervisorSpec(flags=Flags(strategy=strategy, intensity=intensity), children=specs), lambda: 0.0)
    drive(made.boot())
    return made


def drive(operation: Operation, failing: tuple[str, ...] = (), ignoring: tuple[str, ...] = ()) -> list[str]:
    """Run an operation to its end; return what it did, as words."""
    trace: list[str] = []
    value: Any = None
    while True:
        try:
            command = operation.send(value)
        except StopIteration:
            return trace
        value = None
        if isinstance(command, Start):
            name = command.child.spec.id
            trace.append(f"start {name}")
            value = Started()
            if name in failing:
                value = StartFailed(CRASH)
            elif name in ignoring:
                value = Ignored()
        elif isinstance(command, Stop):
            trace.append("stop " + "+".join(c.spec.id for c in command.children))
            value = [ASKED for _ in command.children]
        elif isinstance(command, Report) and command.context != "progress":
            trace.append(f"{command.context} {command.child.spec.id}")
        elif isinstance(command, Later):
            trace.append("later")
        elif isinstance(command, Reply):
            trace.append(f"reply {command.answer}")
        elif isinstance(command, Exit):
            trace.append(f"exit {command.reason.kind}")


def crash(made: Node, child_id: str, reason: ExitReason = CRASH) -> Operation:
    child = find(made, child_id)
    child.state, child.unhandled_exit = "undefined", reason
    return made.child_exited(child, child.incarnation)


def find(made: Node, child_id: str) -> Child:
    child = made.find(child_id)
    assert child is not None
    return child


def test_children_start_in_order_and_stop_in_reverse() -> None:
    """Statements 16 and 80."""
    made = Node(SupervisorSpec(children=[ChildSpec(id="a", start=start), ChildSpec(id="b", start=start)]), lambda: 0.0)
    assert drive(made.boot()) == ["start a", "start b"]
    assert drive(made.stop(ASKED)) == ["stop b", "stop a", "exit shutdown"]


def test_a_failed_start_at_boot_stops_the_others_in_reverse() -> None:
    """Statements 21 and 22."""
    specs = [ChildSpec(id=i, start=start) for i in "abc"]
    made = Node(SupervisorSpec(children=specs), lambda: 0.0)
    trace = drive(made.boot(), failing=("c",))
    assert trace == ["start a", "start b", "start c", "start_error c", "stop b", "stop a", "exit start_failed"]


def test_one_for_one_restarts_only_the_dead() -> None:
    """Statement 45."""
    made = node("one_for_one", "permanent", "permanent", "permanent")
    assert drive(crash(made, "c2")) == ["child_terminated c2", "start c2"]


def test_rest_for_one_cycles_those_after_the_dead() -> None:
    """Statements 47 and 48."""
    made = node("rest_for_one", "permanent", "permanent", "permanent")
    assert drive(crash(made, "c2")) == ["child_terminated c2", "stop c3", "start c2", "start c3"]


def test_one_for_all_cycles_everybody() -> None:
    """Statement 46."""
    made = node("one_for_all", "permanent", "permanent", "permanent")
    assert drive(crash(made, "c2")) == ["child_terminated c2", "stop c3", "stop c1", "start c1", "start c2", "start c3"]


def test_a_finished_transient_child_starts_again_with_its_segment() -> None:
    """Statement 38: the one-shot starter has to be transient."""
    made = node("rest_for_one", "permanent", "transient")
    assert drive(crash(made, "c2", ExitReason("normal"))) == []
    assert drive(crash(made, "c1")) == ["child_terminated c1", "start c1", "start c2"]


def test_a_transient_child_is_restarted_only_after_a_crash() -> None:
    """Statement 34."""
    made = node("one_for_one", "transient")
    assert drive(crash(made, "c1", ExitReason("shutdown"))) == []
    assert drive(crash(made, "c1")) == ["child_terminated c1", "start c1"]


def test_a_permanent_child_is_restarted_even_after_a_normal_end() -> None:
    """Statement 33."""
    made = node("one_for_one", "permanent")
    assert drive(crash(made, "c1", ExitReason("normal"))) == ["child_terminated c1", "start c1"]


def test_a_temporary_child_is_never_restarted_and_forgotten() -> None:
    """Statements 35 and 36."""
    made = node("rest_for_one", "permanent", "temporary", "permanent")
    assert drive(crash(made, "c1")) == ["child_terminated c1", "stop c3", "stop c2", "start c1", "start c3"]
    assert made.find("c2") is None


def test_one_restart_too_many_stops_everything() -> None:
    """Statements 58 and 65."""
    made = node("one_for_one", "permanent", "permanent", intensity=1)
    drive(crash(made, "c1"))
    assert drive(crash(made, "c1")) == ["child_terminated c1", "shutdown c1", "stop c2", "exit shutdown"]


def test_a_failed_restart_is_tried_again_later_and_counts() -> None:
    """Statements 63, 70 and 75: the child restarted before the failing one stays up."""
    made = node("rest_for_one", "permanent", "permanent", intensity=2)
    trace = drive(crash(made, "c1"), failing=("c2",))
    assert trace == ["child_terminated c1", "start c1", "start c2", "start_error c2", "later"] or trace == [
        "child_terminated c1",
        "stop c2",
        "start c1",
        "start c2",
        "start_error c2",
        "later",
    ]
    assert find(made, "c2").state == "restarting"
    assert drive(made.retry(find(made, "c2"))) == ["start c2"]
    assert find(made, "c1").incarnation == 2


def test_a_terminated_child_is_not_tried_again() -> None:
    """Statement 72."""
    made = node("one_for_one", "permanent", "permanent")
    drive(crash(made, "c1"), failing=("c1",))
    assert drive(made.terminate_child("c1")) == ["reply ('ok', None, None)"]
    assert drive(made.retry(find(made, "c1"))) == []


def test_a_death_that_was_handled_as_a_bystander_costs_nothing_more() -> None:
    """Statements 51, 52 and 54: its own reason is reported, and no restart is counted for it."""
    made = node("rest_for_one", "permanent", "permanent", intensity=1)
    second = crash(made, "c2")
    assert drive(crash(made, "c1")) == ["child_terminated c1", "shutdown_error c2", "start c1", "start c2"]
    assert drive(second) == []


def test_children_that_ignore_their_start_stay_listed() -> None:
    """Statement 20."""
    made = Node(SupervisorSpec(children=[ChildSpec(id="a", start=start)]), lambda: 0.0)
    assert drive(made.boot(), ignoring=("a",)) == ["start a"]
    assert find(made, "a").state == "undefined"


def test_a_dynamic_supervisor_stops_its_children_all_at_once() -> None:
    """Statement 122."""
    made = Node(SupervisorSpec(dynamic=True), lambda: 0.0)
    for name in "ab":
        assert drive(made.start_child(ChildSpec(id=name, start=start))) == [f"start {name}", "reply ('ok', None, None)"]
    assert drive(made.start_child(ChildSpec(id="a", start=start))) == ["reply ('error', 'already_started')"]
    assert drive(made.stop(ASKED)) == ["stop a+b", "exit shutdown"]


def test_a_child_that_cannot_start_is_not_stored() -> None:
    """Statement 99."""
    made = Node(SupervisorSpec(dynamic=True), lambda: 0.0)
    trace = drive(made.start_child(ChildSpec(id="a", start=start)), failing=("a",))
    assert trace == ["start a", "reply ('error', 'exited with status 1')"]
    assert made.children == []


class Recorder:
    """Carries out what runners decide by writing it down."""

    def __init__(self) -> None:
        self.resumed: list[Runner] = []
        self.trace: list[str] = []
        self.on_booted: Any = None

    def resume(self, runner: Runner) -> None:
        self.resumed.append(runner)

    def start(self, runner: Runner, child: Child) -> None:
        self.trace.append(f"start {child.spec.id}")
        runner.child_started(child, Started())

    def stop_child(self, child: Child) -> None:
        self.trace.append(f"stop {child.spec.id}")

    def booted(self, runner: Runner) -> None:
        self.trace.append("booted")
        if self.on_booted is not None:
            self.on_booted()

    def exited(self, runner: Runner, reason: ExitReason) -> None:
        self.trace.append(f"exit {reason.kind}")

    def report(self, runner: Runner, report: Report) -> None:
        if report.context != "progress":
            self.trace.append(f"{report.context} {report.child.spec.id}")

    def run(self) -> None:
        while self.resumed:
            self.resumed.pop(0).advance()


def test_a_stop_asked_for_in_the_middle_of_an_operation_is_carried_out_once() -> None:
    recorder = Recorder()
    specs = [ChildSpec(id=i, start=start) for i in "ab"]
    runner = Runner(Node(SupervisorSpec(children=specs), lambda: 0.0), (), None, recorder)
    recorder.on_booted = lambda: runner.request_stop(ASKED)
    runner.enqueue(runner.node.boot())
    recorder.run()
    for name in "ba":
        runner.child_stopped(find(runner.node, name), ASKED)
        recorder.run()
    assert recorder.trace == ["start a", "start b", "booted", "stop b", "stop a", "exit shutdown"]


def test_calls_that_wait_when_the_stop_comes_are_answered_once() -> None:
    """Statement 87."""
    recorder = Recorder()
    runner = Runner(Node(SupervisorSpec(dynamic=True), lambda: 0.0), (), None, recorder)
    runner.enqueue(runner.node.boot())
    answers: list[Any] = []
    runner.enqueue(runner.node.start_child(ChildSpec(id="a", start=start)), answers.append)
    runner.enqueue(runner.node.start_child(ChildSpec(id="b", start=start)), answers.append)
    runner.advance()
    runner.request_stop(ASKED)
    runner.enqueue(runner.node.start_child(ChildSpec(id="c", start=start)), answers.append)
    assert answers == [("error", "stopping")] * 3
    assert recorder.trace == ["booted", "start a"]


def test_events_that_come_at_once_are_served_one_after_the_other() -> None:
    """Statements 69 and 186: two deaths, and a stop, before the node has had its turn."""
    recorder = Recorder()
    specs = [ChildSpec(id=i, start=start) for i in "ab"]
    flags = Flags(intensity=5)
    runner = Runner(Node(SupervisorSpec(flags=flags, children=specs), lambda: 0.0), (), None, recorder)
    runner.enqueue(runner.node.boot())
    recorder.run()
    recorder.trace.clear()
    for name in "ab":
        runner.child_died(find(runner.node, name), CRASH)
    recorder.run()
    restarts = ["child_terminated a", "start a", "child_terminated b", "start b"]
    assert recorder.trace == restarts
    assert [c.state for c in runner.node.children] == ["running", "running"]
    recorder.trace.clear()
    runner.child_died(find(runner.node, "a"), CRASH)
    runner.request_stop(ASKED)
    recorder.run()
    runner.child_stopped(find(runner.node, "b"), ASKED)
    recorder.run()
    assert recorder.trace == ["stop b", "shutdown_error a", "exit shutdown"]


def test_a_start_that_fails_in_the_moment_of_the_stop_leaves_nothing_to_stop() -> None:
    """Statement 28: the stop has been asked for, and before its turn comes the half-started child is found dead."""
    recorder = Recorder()
    recorder.start = lambda runner, child: recorder.trace.append(f"start {child.spec.id}")  # type: ignore[method-assign]
    runner = Runner(Node(SupervisorSpec(children=[ChildSpec(id="a", start=start)]), lambda: 0.0), (), None, recorder)
    runner.enqueue(runner.node.boot())
    recorder.run()
    runner.request_stop(ASKED)
    assert not runner.child_started(find(runner.node, "a"), StartFailed(CRASH))
    recorder.run()
    assert recorder.trace == ["start a", "exit shutdown"]
