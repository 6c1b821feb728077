"""Child processes that behave and misbehave, for the supervisor's tests."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgflow_otp.otp.child import ChildContext


def obedient(context: ChildContext) -> int:
    """Acknowledge, then leave when asked."""
    context.ready(pid=os.getpid())
    return obeying(context)


def wedged(context: ChildContext) -> int:
    """Acknowledge, then answer nothing; a SIGTERM would end it."""
    context.ready(pid=os.getpid())
    while True:
        time.sleep(3600)


def wedged_hard(context: ChildContext) -> int:
    """As `wedged`, and SIGABRT does not end it."""
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    return wedged(context)


def orphaning(context: ChildContext) -> int:
    """Leave a process behind whose parent is dead, and which dies soon after."""
    read, write = os.pipe()
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.005)
            os.write(write, str(os.getppid()).encode())
            os._exit(0)
        os._exit(0)
    os.wait()
    context.ready(pid=os.getpid(), ppid=int(os.read(read, 20)))
    return obeying(context)


def signals(context: ChildContext) -> int:
    """Tell what is left of the parent's signal handling."""
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    context.ready(
        blocked=sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        handled=sorted(int(n) for n in numbers if callable(signal.getsignal(n))),
        ignored=sorted(int(n) for n in numbers if signal.getsignal(n) == signal.SIG_IGN),
        wakeup=signal.set_wakeup_fd(-1),
    )
    return obeying(context)


def late(context: ChildContext) -> int:
    """Tell its pid and never acknowledge."""
    context.send("here", pid=os.getpid())
    return sleepy(context)


def rolling(context: ChildContext) -> int:
    """Tell a random number."""
    context.ready(number=random.random())
    return obeying(context)


def answering(context: ChildContext) -> int:
    """Acknowledge, answer pings, leave when asked."""
    context.ready(pid=os.getpid())
    while True:
        select.select([context.channel], [], [])
        for message, _ in context.channel.receive():
            if message["m"] == "shutdown":
                return 0
            if message["m"] == "ping":
                context.send("pong")
                context.send("answered")


def hiding(context: ChildContext) -> int:
    """Acknowledge, then take no notice of anything and let go of everything its supervisor holds it by."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.ready(pid=os.getpid())
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    os.closerange(3, 100)
    while True:
        time.sleep(3600)


def told(context: ChildContext, *arguments: object) -> int:
    """Acknowledge with the arguments it got."""
    context.ready(pid=os.getpid(), arguments=list(arguments))
    return obeying(context)


def garbling(context: ChildContext) -> int:
    """Acknowledge, then send something that is no frame."""
    context.ready(pid=os.getpid())
    context.channel.socket.setblocking(True)
    context.channel.socket.sendall(b"\xff" * 64)
    return obeying(context)


def leaving(context: ChildContext, status: int) -> int:
    """Leave by itself, with a status, as soon as anybody is asked to leave: the moment another one of its kind does."""
    context.ready(pid=os.getpid())
    while True:
        select.select([context.channel], [], [])
        for message, _ in context.channel.receive():
            if message["m"] in ("leave", "shutdown"):
                return status if message["m"] == "leave" else 0


def gated(context: ChildContext, gate: str) -> int:
    """Ask for permission in its init: a file that holds `ready`, `fail` or `ignore`, once for each start."""
    context.send("waiting")
    while True:
        try:
            with open(gate) as file:
                word = file.read()
            os.unlink(gate)
            break
        except FileNotFoundError:
            time.sleep(0.005)
    if word == "fail":
        context.fail("no permission")
        return 1
    if word == "ignore":
        context.ignore()
        return 0
    context.ready(pid=os.getpid())
    return obeying(context)


def obeying(context: ChildContext) -> int:
    """Leave when asked."""
    while True:
        select.select([context.channel], [], [])
        for message, _ in context.channel.receive():
            if message["m"] == "shutdown":
                return 0
        if not context.channel.is_open:
            return 0


def stubborn(context: ChildContext) -> int:
    """Acknowledge, then take no notice of anything."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.ready(pid=os.getpid())
    while True:
        time.sleep(3600)


def sleepy(context: ChildContext) -> int:
    """Never acknowledge."""
    time.sleep(3600)
    return 0


def ignoring(context: ChildContext) -> int:
    """Have nothing to do."""
    context.ignore()
    return 0


def refusing(context: ChildContext) -> int:
    """Fail to start, with a reason."""
    context.fail("no licence")
    return 1


def raising(context: ChildContext) -> int:
    """Fail to start by an exception."""
    raise RuntimeError("broken on purpose")


def finishing(context: ChildContext) -> int:
    """Do something once and end well."""
    context.ready(pid=os.getpid())
    context.send("note", text="did it")
    return 0


def second_time_unlucky(context: ChildContext, marker: str) -> int:
    """Start well the first time and fail ever after."""
    if os.path.exists(marker):
        context.fail("not again")
        return 1
    with open(marker, "w"):
        pass
    return obedient(context)


def scripted(context: ChildContext, script: str) -> int:
    """Say that a start was tried, and let the next word of the script decide what comes of it; "ok" when none is left.
    No two starts of one supervisor happen at once."""
    context.send("began")
    with open(script) as file:
        words = file.read().split()
    with open(script, "w") as file:
        file.write(" ".join(words[1:]))
    word = words[0] if words else "ok"
    if word == "fail":
        context.fail("failed")
        return 1
    if word == "ignore":
        context.ignore()
        return 0
    return leaving(context, 0)


def parent(context: ChildContext) -> int:
    """Have a child of its own that takes no notice of anything."""
    from pgflow_otp.otp.process import fork

    pid = fork(lambda: time.sleep(3600), keep=(), title="pgflow-otp: grandchild", dies_with_parent=True)
    context.ready(pid=os.getpid(), grandchild=pid)
    while True:
        time.sleep(3600)


def descriptors(context: ChildContext) -> int:
    """Tell which descriptors it has."""
    names = sorted(int(n) for n in os.listdir("/proc/self/fd"))
    links = {}
    for number in names:
        try:
            links[str(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
    context.ready(descriptors=links, channel=context.channel.fileno(), lifeline=context.lifeline)
    sys.stderr.flush()
    return obedient(context)
