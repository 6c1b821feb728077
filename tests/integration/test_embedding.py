"""`Supervisor.spawn` in the programs people embed it in; flows that no module holds."""

from __future__ import annotations

import asyncio
import gc
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from flows import zoo
from integration.conftest import QUICK, pid_of
from support.processes import PATIENCE, is_alive, titled, wait_for, wait_gone

from pgflow_otp import ConfigurationError, Flow, FlowDefinitionError, PgflowError, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.conftest import Spawn

TESTS = Path(__file__).resolve().parent.parent

#: A host without a module: a flow of its own, run once.
HOST = """
import os, sys
from pgflow_otp import Flow, Supervisor
factor = 3
flow = Flow("triple")
@flow.step("times")
def times(number, ctx):
    return number * factor
{before}
tree = Supervisor.spawn([flow], dsn=sys.argv[1], min_poll_interval=0.02, max_poll_interval=0.1)
tree.await_ready(30)
output = tree.client.start_flow_sync("triple", 14, timeout=30).output
{after}
status = tree.stop()
os.write(1, f"{{output}} {{status}}\\n".encode())
"""


def host(database: str, *options: str, before: str = "", after: str = "", **kwargs: Any) -> str:
    """Run a host as `python -c`; what it printed."""
    done = subprocess.run(
        [sys.executable, *options, "-c", HOST.format(before=before, after=after), database],
        capture_output=True,
        timeout=120,
        check=False,
        **{"text": True, **kwargs},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return str(done.stdout)


RIGHT = "{'times': 42} 0\n"


# Flows as objects


def test_closures_and_lambdas_are_handed_over(spawn: Callable[..., Supervisor]) -> None:
    factor = 6
    flow = Flow("closed")
    flow.step("times")(lambda number, ctx: number * factor)

    @flow.step(depends_on=["times"])
    def add(deps: Any, ctx: Any) -> Any:
        return deps["times"] + len(QUICK)  # a global of this module comes along

    tree = spawn(flow)
    assert tree.client.start_flow_sync(flow, 7).output == {"add": 42 + len(QUICK)}
    # The handler's own process is replaced, and so is its parent: both have it still.
    worker = pid_of(tree, "worker:closed")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: pid_of(tree, "worker:closed") != worker, "another worker")
    assert tree.client.start_flow_sync(flow, 1).output == {"add": 6 + len(QUICK)}


def test_objects_of_a_module_go_by_their_name(spawn: Callable[..., Supervisor]) -> None:
    tree = spawn(zoo.one, "flows.zoo:many", zoo.greet)
    assert {m["target"] for m in tree.status()["modules"]} == {"flows.zoo:one", "flows.zoo:many", "flows.zoo:greet"}
    assert tree.client.start_flow_sync("greet", "you").output == {"greet": "hello you"}


def test_an_object_can_be_added_to_a_running_tree(spawn: Callable[..., Supervisor]) -> None:
    tree = spawn("flows.zoo:one")
    flow = Flow("late")
    big = "x" * 3_000_000  # more than a header may hold
    flow.step("size")(lambda _, ctx: len(big))
    assert tree.start_worker(flow)["started"] == ["late"]
    assert tree.client.start_flow_sync("late", None).output == {"size": 3_000_000}
    assert tree.start_worker(flow)["running"] == ["late"]
    tree.stop_worker("late")
    assert tree.start_worker("late")["started"] == ["late"]


def test_what_cannot_be_handed_over_is_refused_at_once(database: str) -> None:
    running = (n for n in range(3))
    flow = Flow("held")
    flow.step("a")(lambda _, ctx: next(running))
    with pytest.raises(
        FlowDefinitionError, match=r"flow 'held' cannot be given to another process .*'generator' object"
    ):
        Supervisor.spawn([flow], dsn=database)


def test_two_objects_with_one_slug_are_refused(database: str) -> None:
    flows = [Flow("twin"), Flow("twin")]
    for number, flow in enumerate(flows):
        flow.step("a")(lambda _, ctx, n=number: n)
    with pytest.raises(ConfigurationError, match="two of the flows have the slug 'twin'"):
        Supervisor.spawn(flows, dsn=database)
    with pytest.raises(ConfigurationError, match="flows is empty"):
        Supervisor.spawn([], dsn=database)
    with pytest.raises(ConfigurationError, match="flows holds 5"):
        Supervisor.spawn([5], dsn=database)  # type: ignore[list-item]


# Hosts


@pytest.mark.parametrize("options", [(), ("-I",), ("-X", "dev"), ("-P",)], ids=["plain", "-I", "dev", "-P"])
def test_python_c(database: str, options: tuple[str, ...]) -> None:
    assert host(database, *options) == RIGHT


def test_a_host_that_ignores_sigchld(database: str) -> None:
    assert host(database, before="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)") == RIGHT


def test_a_host_that_reaps_whatever_it_finds(database: str) -> None:
    reaper = """
import threading, time
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)
threading.Thread(target=reap, daemon=True).start()
"""
    assert host(database, before=reaper) == RIGHT
    killed = "import signal; os.kill(tree.pid, signal.SIGKILL)"
    assert host(database, before=reaper, after=killed) == "{'times': 42} -9\n"


def test_a_host_without_standard_streams(database: str, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    script = HOST.format(before="", after="").replace("os.write(1, ", f"open({str(answer)!r}, 'wb').write(")
    closing = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, sys.argv[1:])"
    own = [sys.executable, "-c", script, database]
    done = subprocess.run([sys.executable, "-c", closing, *own], timeout=120, check=False)
    assert done.returncode == 0
    assert answer.read_text() == RIGHT


def test_a_host_in_another_directory(database: str, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the queue you want')")
    # What is in the current directory is the user's to import, and stands in for nothing of the library's.
    assert host(database, "-P", cwd=tmp_path) == RIGHT
    assert host(database, "-P", before="import tempfile; os.chdir(tempfile.gettempdir())", cwd=tmp_path) == RIGHT


def test_a_host_with_busy_threads(database: str) -> None:
    """The tree is no fork of the host: whatever lock its threads hold, nobody inherits it."""
    threads = """
import threading, logging
stop = threading.Event()
def busy():
    while not stop.is_set():
        logging.getLogger("busy").warning("x" * 10)
        [str(i) for i in range(200)]
logging.lastResort = logging.NullHandler()
for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
"""
    again = """
for _ in range(8):
    other = Supervisor.spawn([flow], dsn=sys.argv[1])
    other.await_ready(60)
    assert other.stop() == 0
stop.set()
"""
    assert host(database, before=threads, after=again) == RIGHT


def test_a_prompt(database: str) -> None:
    """A session at a prompt has no main file: its functions live nowhere but in memory."""
    ours, theirs = pty.openpty()
    prompt = subprocess.Popen(
        [sys.executable, "-q", "-i", "-c", "import sys"], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHON_BASIC_REPL": "1", "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    lines = [
        "from pgflow_otp import Flow, Supervisor",
        "flow = Flow('typed')",
        "_ = flow.step('a')(lambda number, ctx: number + offset)",
        "offset = 41",
        f"tree = Supervisor.spawn(flow, dsn={database!r}, min_poll_interval=0.02, max_poll_interval=0.1)",
        "tree.await_ready(30)",
        "print('it', 'says', tree.client.start_flow_sync('typed', 1, timeout=30).output)",
        "print('and', 'ends', tree.stop())",
        "exit()",
    ]
    os.write(ours, "".join(f"{line}\n" for line in lines).encode())
    said = b""
    while b"and ends 0" not in said:
        assert select.select([ours], [], [], PATIENCE)[0], said
        said += os.read(ours, 65_536)
    assert b"it says {'a': 42}" in said
    assert prompt.wait(PATIENCE) == 0
    os.close(ours)


def test_a_thread(database: str) -> None:
    outputs: list[Any] = []

    def work() -> None:
        with Supervisor.spawn("flows.zoo:one", dsn=database, **QUICK) as tree:
            tree.await_ready(30)
            outputs.append(tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outputs == [{"act": 1}]


def test_an_asyncio_program(database: str) -> None:
    async def main() -> Any:
        tree = Supervisor.spawn("flows.zoo:one", dsn=database, **QUICK)
        child = await asyncio.create_subprocess_exec("true")  # the loop's own watch on its children still works
        try:
            await asyncio.to_thread(tree.await_ready, 30)
            run = await asyncio.to_thread(tree.client.start_flow_sync, "one", {"do": "echo", "value": 1})
            return run.output, await child.wait()
        finally:
            await asyncio.to_thread(tree.stop)

    assert asyncio.run(main()) == ({"act": 1}, 0)


def test_many_threads_use_one_handle(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    answers: list[Any] = []

    def ask(number: int) -> None:
        for i in range(20):
            if (number + i) % 2:
                answers.append(tree.count_children()["active"])
            else:
                answers.append(tree.scale_worker("one", batch_size=number + 1)["running"])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 120
    assert all(answer is True or answer == 1 for answer in answers)


def test_one_thread_stops_while_another_waits(database: str) -> None:
    tree = Supervisor.spawn("flows.zoo:one", dsn="host=127.0.0.1 port=1 dbname=none")
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            tree.await_ready(PATIENCE)
        except PgflowError as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: tree.status()["children"], "the tree to be up")
    assert tree.stop() == 0
    waiting.join()
    assert "the tree has ended with status 0" in str(seen[0])


def test_the_host_is_left_as_it_was(database: str) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    threads = threading.active_count()
    with Supervisor.spawn("flows.zoo:one", dsn=database) as tree:
        tree.await_ready(30)
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        assert threading.active_count() == threads
    assert tree.stop() == 0  # once more is no error
    assert tree.join() == 0


def test_a_dropped_handle_does_not_end_the_tree(database: str) -> None:
    tree = Supervisor.spawn("flows.zoo:one", dsn=database, **QUICK)
    tree.await_ready(30)
    pid, client = tree.pid, tree.client
    del tree
    gc.collect()
    assert client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}
    os.kill(pid, signal.SIGTERM)
    wait_gone(pid)
    client.close()
    from pgflow_otp.runtime import handle

    (kept,) = [tree for tree in handle._alive if tree.pid == pid]
    assert kept.join() == 0


DYING_HOST = """
import os, sys, time
from pgflow_otp import Supervisor
tree = Supervisor.spawn("flows.zoo:one", dsn=sys.argv[1])
tree.await_ready(30)
os.write(1, f"{tree.pid}\\n".encode())
if os.fork() == 0:
    try:
        tree.status()
    except Exception as error:
        os.write(1, f"{os.getpid()} {error}\\n".encode())
    with tree:
        pass
    time.sleep(3600)
time.sleep(3600)
"""


def test_a_fork_of_the_host_neither_keeps_nor_ends_the_tree(database: str, token: str) -> None:
    """It has the channel, as everything that the host had open: the kernel tells of the host's death all the same."""
    dying = subprocess.Popen(
        [sys.executable, "-c", DYING_HOST, database], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    assert dying.stdout is not None
    root = int(dying.stdout.readline())
    fork, refusal = dying.stdout.readline().split(" ", 1)
    assert f"this tree belongs to process {dying.pid}; a fork of it cannot use the handle" in refusal
    assert is_alive(root)
    dying.kill()
    dying.wait()
    dying.stdout.close()
    wait_gone(root)
    assert is_alive(int(fork))
    os.kill(int(fork), signal.SIGKILL)
    wait_for(lambda: not titled(token, "pgflow-otp"), "the end of the tree")


def test_trees_side_by_side_get_names_of_their_own(spawn: Spawn) -> None:
    names = {spawn("flows.zoo:one").name for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith(f"pgflow-{os.getpid()}-") for name in names)


def test_nothing_of_the_host_is_inherited(spawn: Spawn) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    tree = spawn("flows.zoo:one")
    os.close(write)
    assert os.read(read, 1) == b""  # nobody else holds it
    os.close(read)
    assert psutil.Process(tree.pid).terminal() is None or os.getsid(tree.pid) == tree.pid
