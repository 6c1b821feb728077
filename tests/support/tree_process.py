"""A supervisor in a process of its own, told what to do on standard input, telling what happens on standard output.

Run as `python -m support.tree_process NAME [ARGUMENT]`, where NAME is one of the trees below.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp import process
from pgflow_otp.otp.channel import Channel
from pgflow_otp.otp.child_spec import ChildSpec, Flags, SpecError, SupervisorSpec
from pgflow_otp.otp.hooks import Hooks
from pgflow_otp.otp.nested import run_supervisor
from pgflow_otp.otp.supervisor import Supervisor
from support import children
from support.processes import PATIENCE

if TYPE_CHECKING:
    from pgflow_otp.otp.exit_reason import ExitReason
    from pgflow_otp.otp.operation import Report


def trees(name: str, argument: str) -> SupervisorSpec:
    """Return a specification by name."""
    a, b, c = (ChildSpec(id=i, start=children.obedient) for i in "abc")
    if name in ("one_for_one", "rest_for_one", "one_for_all"):
        return SupervisorSpec(flags=Flags(strategy=name, intensity=3, period=60), children=[a, b, c])  # type: ignore[arg-type]
    if name == "impatient":
        return SupervisorSpec(flags=Flags(intensity=1, period=60), children=[a, b])
    if name == "stubborn":
        return SupervisorSpec(children=[a, ChildSpec(id="s", start=children.stubborn, shutdown=200)])
    if name == "brutal":
        return SupervisorSpec(children=[ChildSpec(id="s", start=children.stubborn, shutdown="brutal_kill")])
    if name == "forever":
        return SupervisorSpec(children=[ChildSpec(id="s", start=children.stubborn, shutdown="infinity")])
    if name in ("refusing", "raising", "ignoring", "sleepy"):
        start = getattr(children, name)
        return SupervisorSpec(children=[a, ChildSpec(id="x", start=start, start_timeout=0.3), c])
    if name == "finishing":
        one_shot = ChildSpec(id="once", start=children.finishing, restart="transient")
        return SupervisorSpec(flags=Flags(strategy="rest_for_one", intensity=5), children=[a, one_shot])
    if name == "nested":
        inner = SupervisorSpec(flags=Flags(intensity=1, period=60), children=[b, c])
        nested = ChildSpec(id="inner", start=inner, type="supervisor")
        return SupervisorSpec(flags=Flags(strategy="rest_for_one", intensity=3, period=60), children=[a, nested])
    if name == "dynamic":
        return SupervisorSpec(dynamic=True, flags=Flags(intensity=1000, period=60))
    if name == "dynamic_static":
        return SupervisorSpec(flags=Flags(intensity=1000, period=60))
    if name == "storm":
        return SupervisorSpec(
            flags=Flags(intensity=1_000_000, period=60),
            children=[a, ChildSpec(id="u", start=children.second_time_unlucky, args=(argument,))],
        )
    if name == "thief":
        return SupervisorSpec(children=[ChildSpec(id="t", start=children.obedient)])
    if name == "orphaning":
        return SupervisorSpec(children=[ChildSpec(id="o", start=children.orphaning), a])
    if name == "starving":
        return SupervisorSpec(flags=Flags(intensity=2, period=60), children=[a])
    if name == "default_signals":
        return SupervisorSpec(children=[ChildSpec(id="s", start=children.signals)])
    if name == "late":
        return SupervisorSpec(children=[ChildSpec(id="l", start=children.late)])
    if name == "crowded":
        return SupervisorSpec(dynamic=True, max_children=2, extra_args=("extra",))
    if name in ("watched", "watched_hard"):
        start = children.wedged if name == "watched" else children.wedged_hard
        wedged = ChildSpec(id="w", start=start, watchdog=0.4)
        answering = ChildSpec(id="a", start=children.answering, watchdog=0.4)
        return SupervisorSpec(flags=Flags(intensity=1000, period=60), children=[answering, wedged])
    if name == "answering":
        return SupervisorSpec(children=[ChildSpec(id="a", start=children.answering, watchdog=0.4)])
    if name == "hiding":
        return SupervisorSpec(children=[ChildSpec(id="h", start=children.hiding, shutdown=200)])
    if name == "garbling":
        return SupervisorSpec(flags=Flags(intensity=0), children=[ChildSpec(id="g", start=children.garbling)])
    if name in ("gated_one_for_one", "gated_rest_for_one", "gated_one_for_all"):
        gated = ChildSpec(id="g", start=children.gated, args=(argument,), restart="transient")
        strategy = name.removeprefix("gated_")
        return SupervisorSpec(flags=Flags(strategy=strategy, intensity=1000, period=60), children=[a, gated, c])  # type: ignore[arg-type]
    if name.startswith("scripted "):
        _, strategy, intensity, *restarts = name.split()
        flags = Flags(strategy=strategy, intensity=int(intensity), period=3600)  # type: ignore[arg-type]
        scripted = [
            ChildSpec(id=i, start=children.scripted, args=(argument,), restart=kind)  # type: ignore[arg-type]
            for i, kind in zip("abcd", restarts, strict=False)
        ]
        return SupervisorSpec(flags=flags, children=scripted)
    if name == "separate":
        inner = SupervisorSpec(flags=Flags(strategy="rest_for_one", intensity=1, period=60), children=[b, c])
        nested = ChildSpec(
            id="inner", start=run_supervisor, args=(inner,), type="supervisor", dies_with_parent=argument == "dies"
        )
        return SupervisorSpec(flags=Flags(intensity=3, period=60), children=[a, nested])
    if name in ("any_significant", "all_significant"):
        flags = Flags(auto_shutdown=name, intensity=1000)  # type: ignore[arg-type]
        significant = [
            ChildSpec(id=i, start=children.leaving, args=(0,), restart="transient", significant=True) for i in "st"
        ]
        return SupervisorSpec(flags=flags, children=[a, *significant])
    if name == "leaving_inside":
        leaving = ChildSpec(id="s", start=children.leaving, args=(0,), restart="transient", significant=True)
        inside = SupervisorSpec(flags=Flags(auto_shutdown="any_significant"), children=[b, leaving])
        nested = ChildSpec(id="inner", start=inside, type="supervisor", restart=argument)  # type: ignore[arg-type]
        return SupervisorSpec(flags=Flags(intensity=3, period=60), children=[a, nested])
    if name == "unlucky":
        unlucky = ChildSpec(id="u", start=children.second_time_unlucky, args=(argument,))
        return SupervisorSpec(flags=Flags(strategy="rest_for_one", intensity=4, period=60), children=[a, unlucky])
    if name == "parent":
        return SupervisorSpec(children=[ChildSpec(id="p", start=children.parent)])
    if name == "descriptors":
        return SupervisorSpec(children=[a, ChildSpec(id="d", start=children.descriptors)])
    raise KeyError(name)


class Telling(Hooks):
    """Prints everything."""

    supervisor: Supervisor

    def tell(self, event: str, **content: Any) -> None:
        print(json.dumps({"event": event, **content}), flush=True)

    def on_boot(self) -> None:
        self.tell("boot")

    def on_start(self, path: tuple[str, ...], info: dict[str, Any]) -> None:
        self.tell("start", path=path, info=info)

    def on_exit(self, path: tuple[str, ...], reason: ExitReason, info: dict[str, Any], *, requested: bool) -> None:
        self.tell("exit", path=path, kind=reason.kind, reason=str(reason), requested=requested)

    def on_message(self, path: tuple[str, ...], message: dict[str, Any]) -> None:
        self.tell("message", path=path, message=message)

    def on_report(self, path: tuple[str, ...], report: Report) -> None:
        self.tell("report", path=path, context=report.context, reason=report.reason, count=report.count)

    def on_stopping(self) -> None:
        self.tell("stopping")


def main() -> None:
    """Run the tree named on the command line."""
    import socket

    process.HAS_PIDFD = process.HAS_PIDFD and "PGFLOW_TEST_NO_PIDFD" not in os.environ
    name, argument, descriptor = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hooks = Telling()
    supervisor = Supervisor(trees(name, argument), name="test", hooks=hooks)
    channel = Channel(socket.socket(fileno=descriptor))

    def answered(answer: Any) -> None:
        hooks.tell("answer", answer=answer)

    def commanded() -> None:
        for message, _ in channel.receive():
            path = tuple(message.get("path", ()))
            if message["m"] == "which":
                hooks.tell("which", children=supervisor.which_children())
            elif message["m"] == "count":
                hooks.tell("count", **supervisor.count_children())
            elif message["m"] == "start":
                fields = {"restart": "transient", **message.get("fields", {})}
                fields["args"] = tuple(fields.get("args", ()))
                try:
                    spec = ChildSpec(id=message["id"], start=getattr(children, message["start"]), **fields)
                except SpecError as error:
                    answered(("error", str(error)))
                    continue
                supervisor.start_child(path, spec, answered)
            elif message["m"] in ("terminate", "restart", "delete"):
                getattr(supervisor, f"{message['m']}_child")(path, message["id"], answered)
            elif message["m"] == "spec":
                spec_found = supervisor.get_child_spec(path, message["id"])
                hooks.tell(
                    "spec",
                    fields=None
                    if spec_found is None
                    else {f.name: getattr(spec_found, f.name) for f in fields_of(ChildSpec) if f.name != "start"},
                )
            elif message["m"] == "starve":
                if os.getuid() == 0:
                    os.setresuid(65534, 65534, 65534)  # The limit is none for root.
                resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            elif message["m"] == "steal":
                shown = supervisor.which_child(path, message["id"])
                assert shown is not None
                os.kill(shown["pid"], signal.SIGKILL)
                os.waitpid(shown["pid"], 0)
            elif message["m"] == "send":
                supervisor.send((*path, message["id"]), message["what"])
        if not channel.is_open:
            supervisor.detach(channel)
            channel.close()

    supervisor.attach(channel, commanded)
    status = supervisor.run()
    hooks.tell("ended", status=status)
    os._exit(status)


class Tree:
    """The test's side: a running tree, and what it has told."""

    def __init__(
        self,
        name: str,
        argument: str = "",
        *,
        prefix: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        keep_stderr: bool = False,
    ) -> None:
        import socket

        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "support.tree_process", name, argument, str(theirs.fileno())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if keep_stderr else None,
            env={**os.environ, **(environment or {})},
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).parent.parent,
        )
        theirs.close()
        self.events: list[dict[str, Any]] = []
        self._rest = b""

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._channel.close()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def expect(self, event: str, **content: Any) -> dict[str, Any]:
        """Read on until an event with this content; return it. Those before it are kept in `events`."""
        deadline = time.monotonic() + PATIENCE
        assert self.process.stdout is not None
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                told: dict[str, Any] = json.loads(line)
                self.events.append(told)
                if told["event"] == event and all(told.get(k) == v for k, v in content.items()):
                    return told
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"no {event} {content} within {PATIENCE} s; told: {self.events}")
            data = os.read(self.process.stdout.fileno(), 65_536)
            if not data:
                raise AssertionError(f"the tree ended without {event} {content}; told: {self.events}")
            self._rest += data

    def ask(self, message: str, **content: Any) -> None:
        self._channel.send({"m": message, **content})

    def call(self, message: str, **content: Any) -> Any:
        """Make a call and return its answer: ["ok", pid, info] or ["error", reason]."""
        self.ask(message, **content)
        return self.expect("answer")["answer"]

    def which(self) -> dict[str, Any]:
        """Return the children by id, nested ones flattened."""
        self.ask("which")
        found: dict[str, Any] = {}

        def walk(shown: list[dict[str, Any]]) -> None:
            for child in shown:
                found[child["id"]] = child
                walk(child.get("children", []))

        walk(self.expect("which")["children"])
        return found

    def count(self) -> dict[str, int]:
        """Return what count_children says."""
        self.ask("count")
        return {k: v for k, v in self.expect("count").items() if k != "event"}

    def pids(self) -> dict[str, int]:
        return {child: shown["pid"] for child, shown in self.which().items() if shown["pid"]}

    def kill(self, child: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a child; returns its pid."""
        pid = self.pids()[child]
        os.kill(pid, number)
        return pid

    def stop(self) -> int:
        """Stop the tree with SIGTERM; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return int(self.expect("ended")["status"])

    def nested(self, message: str) -> list[str]:
        """Return the children that a supervisor in a process of its own has told of, in order."""
        told = [e["message"] for e in self.events if e["event"] == "message"]
        return [m["path"][-1] for m in told if m["m"] == message]

    def expect_nested(self, message: str, child: str) -> None:
        """Read on until such a supervisor tells of a child."""
        while True:
            told = self.expect("message")["message"]
            if told["m"] == message and told["path"][-1] == child:
                return

    def order(self, *kinds: str) -> list[str]:
        """Return what happened so far, as words, only these kinds of event."""
        return [f"{e['event']} {e['path'][-1]}" for e in self.events if e["event"] in kinds]


if __name__ == "__main__":
    main()
