"""What supervision costs: a restart, an idle tree, an answer in a storm of restarts, and the end of a killed tree."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from harness import Report, fresh_database, parse_options, server
from kills import measure_subtrees

from pgflow_otp.otp import ChildContext, ChildSpec, Flags, Hooks, Supervisor, SupervisorSpec
from pgflow_otp.otp.channel import readable

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds the idle tree is looked at.
IDLE_SECONDS = 10.0


def child(context: ChildContext, crash: bool) -> None:
    """Start doing nothing; crash at once, or stay until asked to leave."""
    context.ready()
    if crash:
        os._exit(1)
    while context.channel.is_open:
        readable(context.channel, 3600)
        if any(message["m"] == "shutdown" for message in context.channel.receive_messages()):
            return


class Telling(Hooks):
    """Prints starts and the beginning of the stop."""

    supervisor: Supervisor

    def on_boot(self) -> None:
        print(json.dumps({"event": "boot", "children": self.supervisor.which_children()}), flush=True)

    def on_start(self, path: tuple[str, ...], info: dict[str, Any]) -> None:
        shown = self.supervisor.which_child((), path[-1])
        print(json.dumps({"event": "start", "pid": shown and shown["pid"]}), flush=True)

    def on_stopping(self) -> None:
        print(json.dumps({"event": "stopping"}), flush=True)

    def on_message(self, path: tuple[str, ...], message: dict[str, Any]) -> None:
        print(json.dumps({"event": "tree", "children": self.supervisor.which_children()}), flush=True)


def run_tree(size: int, crashing: int) -> None:
    """Be the supervisor. SIGUSR1 asks for the state of the tree."""
    specs = [ChildSpec(id=f"c{n}", start=child, args=(n < crashing,)) for n in range(size)]
    hooks = Telling()
    os.register_at_fork(before=lambda: print(json.dumps({"event": "fork"}), flush=True))
    spec = SupervisorSpec(flags=Flags(intensity=10_000_000, period=3600), children=specs)
    hooks.supervisor = Supervisor(spec, name="bench", hooks=hooks)
    os._exit(hooks.supervisor.run())


class Tree:
    """A supervisor in a process of its own, and what it tells."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.root = psutil.Process(process.pid)
        self._lines: list[dict[str, Any]] = []
        self._rest = b""

    def expect(self, event: str) -> dict[str, Any]:
        """Return the next such event."""
        assert self.process.stdout is not None
        while True:
            while self._lines:
                line = self._lines.pop(0)
                if line["event"] == event:
                    return line
            if not select.select([self.process.stdout], [], [], 30)[0]:
                raise TimeoutError(f"no {event} within 30 s")
            data = os.read(self.process.stdout.fileno(), 65_536)
            if not data:
                raise EOFError(event)
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._lines += [json.loads(line) for line in whole]

    def drain(self) -> list[dict[str, Any]]:
        """Return everything up to the end."""
        assert self.process.stdout is not None
        self._rest += self.process.stdout.read()
        lines = self._lines + [json.loads(line) for line in self._rest.split(b"\n") if line]
        self._lines, self._rest = [], b""
        return lines


@contextmanager
def tree(size: int, crashing: int = 0) -> Iterator[Tree]:
    """Run a tree of so many children; the first `crashing` of them crash as soon as they are up."""
    command = [sys.executable, __file__, "--tree", str(size), str(crashing)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield Tree(process)
        finally:
            process.kill()


def measure_restarts(report: Report, rounds: int) -> None:
    """From SIGKILL to `ready`, and what is left behind after all of them."""
    with tree(1) as running:
        pid = running.expect("boot")["children"][0]["pid"]
        for _ in range(20):  # the first ones pay for what is loaded once
            os.kill(pid, signal.SIGKILL)
            pid = running.expect("start")["pid"]
        descriptors, memory, zombies = running.root.num_fds(), running.root.memory_info().rss, 0
        for _ in range(rounds):
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            pid = running.expect("start")["pid"]
            report.add("restart, from SIGKILL to ready", "ms", (time.perf_counter() - began) * 1e3)
            zombies = max(zombies, sum(c.status() == psutil.STATUS_ZOMBIE for c in running.root.children()))
        report.add(f"zombies at most, {rounds} crashes", "", float(zombies))
        report.add(f"descriptors more after {rounds} crashes", "", float(running.root.num_fds() - descriptors))
        report.add(f"memory more after {rounds} crashes", "MiB", (running.root.memory_info().rss - memory) / 2**20)
    for _ in range(100):
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        report.add("a bare fork, exit and wait", "ms", (time.perf_counter() - began) * 1e3)


def measure_idle(report: Report, seconds: float) -> None:
    with tree(20) as running:
        running.expect("boot")
        everybody = [running.root, *running.root.children(recursive=True)]
        before = sum(sum(p.cpu_times()[:2]) for p in everybody)
        time.sleep(seconds)
        used = sum(sum(p.cpu_times()[:2]) for p in everybody) - before
        report.add("an idle tree of 20 children", "% CPU", used / seconds * 100)


def measure_storm(report: Report, rounds: int) -> None:
    """An answer while a child crashes as fast as it is restarted."""
    with tree(2, crashing=1) as running:
        running.expect("boot")
        for _ in range(rounds):
            began = time.perf_counter()
            running.process.send_signal(signal.SIGUSR1)
            running.expect("tree")
            report.add("an answer in a storm of restarts", "ms", (time.perf_counter() - began) * 1e3)


def measure_kills(report: Report, rounds: int) -> None:
    """From SIGKILL of the root to the end of its last child."""
    for _ in range(rounds):
        with tree(5) as running:
            running.expect("boot")
            children = running.root.children(recursive=True)
            began = time.perf_counter()
            running.process.kill()
            while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
                time.sleep(0.001)
            report.add("a killed root, until its last child is gone", "ms", (time.perf_counter() - began) * 1e3)


def measure_stops(report: Report, rounds: int) -> None:
    """A child is killed in the instant of SIGTERM: nothing may be started once the stop has begun."""
    late = 0
    for number in range(rounds):
        with tree(2) as running:
            pid = running.expect("boot")["children"][number % 2]["pid"]
            running.process.send_signal(signal.SIGTERM)
            os.kill(pid, signal.SIGKILL)
            events = [line["event"] for line in running.drain()]
            late += "fork" in events[events.index("stopping") :]
    report.add(f"started after the stop had begun, {rounds} rounds", "", float(late))


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("restart", options)
    quick = options.quick
    measure_restarts(report, 200 if quick else 1000)
    report.calibrate()
    measure_idle(report, IDLE_SECONDS)
    measure_storm(report, 50 if quick else 200)
    measure_kills(report, 10 if quick else 100)
    report.calibrate()
    measure_stops(report, 30 if quick else 500)
    report.calibrate()
    with server(options) as server_dsn, fresh_database(server_dsn) as dsn:
        measure_subtrees(report, dsn, 3 if quick else 100)
    report.ratio("a restart against a bare fork", "restart, from SIGKILL to ready", "a bare fork, exit and wait")
    report.target("restart (ms)", "restart, from SIGKILL to ready", 50)
    report.target("idle tree (% of a core)", "an idle tree of 20 children", 1)
    report.target("answer in a storm (ms)", "an answer in a storm of restarts", 100)
    report.target("subtree gone after SIGKILL (ms)", "a killed root, until its last child is gone", 2000)
    for key in list(report.figures):
        if key.startswith(("zombies", "descriptors", "started after")):
            report.target(key, key, 1 if key.startswith("zombies") else 0)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tree"]:
        sys.path.remove(str(Path(__file__).parent))
        run_tree(int(sys.argv[2]), int(sys.argv[3]))
    main()
