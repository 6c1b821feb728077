"""Random crashes, exits and calls on real processes: what the independent model of OTP says, in the same order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.otp_model import STRATEGIES, Event, Model, World, kinds, scripts
from support.processes import wait_for
from support.tree_process import Tree


def states(tree: Tree) -> dict[str, str]:
    return {name: child["state"] for name, child in tree.which().items()}


def trace_of(events: list[dict[str, Any]]) -> list[str]:
    """Return what the model would have written down."""
    trace: list[str] = []
    for told in events:
        name = told["path"][-1] if told.get("path") else ""
        if told["event"] == "message" and told["message"]["m"] == "began":
            trace.append(f"start {name}")
        elif told["event"] == "exit" and told["requested"]:
            trace.append(f"stop {name}")
        elif told["event"] == "report" and told["context"] != "progress":
            trace.append(f"{told['context']} {name}")
        elif told["event"] == "answer":
            answer = told["answer"]
            text = "ok" if answer[0] == "ok" else answer[1]
            trace.append(f"answer {'failed' if 'failed' in text else text}")
        elif told["event"] == "ended":
            trace.append("exit")
    return trace


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(STRATEGIES), st.integers(0, 4), kinds, scripts)
def test_processes_do_what_otp_does(strategy: str, intensity: int, kinds: list[str], happened: list[Event]) -> None:
    """Statements 16, 20, 32 to 39, 45 to 48, 51, 53, 56 to 58, 62 to 65, 70 to 72, 74 to 78 and 98 to 102."""
    with TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        script.touch()
        world = World()
        model = Model(strategy, intensity, kinds, world)
        with Tree(f"scripted {strategy} {intensity} {' '.join(kinds)}", str(script)) as tree:
            tree.expect("boot")
            for what, name, reason, outcomes, _ in happened:
                script.write_text(" ".join(outcomes))
                world.outcomes = list(outcomes)
                kid = model.get(name)
                if what == "exit":
                    if kid is None or kid.state != "running":
                        continue
                    pid = tree.pids()[name]
                    model.exit(kid, reason)
                    if reason == "crash":
                        os.kill(pid, signal.SIGKILL)
                    else:
                        tree.ask("send", id=name, what="leave")
                    tree.expect("exit", path=[name], requested=False)
                elif what == "retry":
                    continue  # Nobody has to ask for it: the supervisor retries by itself.
                else:
                    model.call(what, name)
                    fields = {"args": [str(script)], "restart": "permanent"} if what == "start" else {}
                    tree.ask(what, id=name, **({"start": "scripted", "fields": fields} if fields else {}))
                    tree.expect("answer")
                while model.retries and not model.over:
                    model.retry()
                if model.over:
                    tree.expect("ended")
                    assert trace_of(tree.events) == model.trace
                    return
                wanted = {k.name: k.state for k in model.kids}
                wait_for(lambda w=wanted: states(tree) == w, f"{wanted}; {trace_of(tree.events)}, not {model.trace}")  # type: ignore[misc]
                assert trace_of(tree.events) == model.trace
            assert tree.stop() == 0
