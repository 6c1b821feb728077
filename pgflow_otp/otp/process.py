"""The only place that forks, and what a child does first (statements 142 to 181).

A child keeps the descriptors it was given and no other, has default signal handlers and an empty mask, its own session,
standard input from /dev/null, and leaves only by os._exit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from setproctitle import setproctitle

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

#: Whether the kernel can tell of a child's death by a descriptor; else SIGCHLD does.
HAS_PIDFD = hasattr(os, "pidfd_open")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Whether orphans come to this process, and the children it had before they could.
_adopts = False
_own_before: frozenset[int] = frozenset()


class ForkError(RuntimeError):
    """A process could not be forked."""


def fork(
    main: Callable[[], int | None],
    *,
    keep: Iterable[int],
    title: str,
    dies_with_parent: bool,
    new_session: bool = True,
) -> int:
    """Fork a process that runs `main` and exits with what it returns (None: 0). Returns its pid.

    Args:
        main: run in the child; an exception is printed and gives exit status 1.
        keep: descriptors the child keeps beside standard output and error.
        title: shown in ps.
        dies_with_parent: SIGKILL when the forking thread's process dies (Linux only; others rely on the lifeline).
        new_session: own session, out of reach of the terminal's signals.

    Raises:
        ForkError: another thread runs (it may hold a lock the child would need), or the system refuses.
    """
    if threading.active_count() > 1:
        raise ForkError(f"cannot fork while {threading.active_count()} threads run")
    parent = os.getpid()
    kept = {0, 1, 2, *keep}
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    # A signal between fork and the child's own handlers would run the parent's handler there and be lost (165).
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        try:
            pid = os.fork()
        except OSError as error:
            raise ForkError(f"fork failed: {error.strerror}") from error
        if pid == 0:
            _run_child(main, kept, title, parent if dies_with_parent else None, new_session)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run_child(
    main: Callable[[], int | None], kept: set[int], title: str, die_with: int | None, new_session: bool
) -> None:
    global _adopts, _own_before
    status = 1
    try:
        _adopts, _own_before = False, frozenset()  # Not inherited.
        gc.freeze()  # Nothing inherited is ever finalised here: it might close a descriptor that has a new owner.
        if new_session:
            os.setsid()
        if die_with is not None:
            set_parent_death_signal(die_with)
        reset_signals()
        close_other_descriptors(kept)
        devnull = os.open(os.devnull, os.O_RDONLY)
        if devnull != 0:
            os.dup2(devnull, 0)
            os.close(devnull)
        random.seed()
        setproctitle(title)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        status = main() or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(status if isinstance(status, int) and 0 <= status <= 255 else 1)


def hold_stop_signals() -> None:
    """Keep requests for the end pending until a supervisor runs: before that they would kill without a word, or be lost
    if we are PID 1 (191). Survives exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))


def reset_signals() -> None:
    """Give every signal its default action, and forget the parent's wakeup descriptor (166)."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def close_other_descriptors(kept: Iterable[int]) -> None:
    """Close every descriptor that is not in the list: by what is open, since the limit may be a billion."""
    for descriptor in open_descriptors().difference(kept):
        try:
            os.close(descriptor)
        except OSError:
            pass


def open_descriptors() -> set[int]:
    """Return the descriptors that are open now."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # The listing's own.
        found.add(int(name))
    return found


def set_parent_death_signal(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; leave at once if it is dead already (146)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Let orphaned descendants become our children, so that they can be found and killed (Linux). The children that are
    there already are none of those."""
    global _adopts, _own_before
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _adopts, _own_before = True, frozenset(children())


def offer_to_the_oom_killer(score: int) -> None:
    """Be killed before others when memory runs out: 0 as likely as by default, up to 1000 (Linux)."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as adjustment:
            if int(adjustment.read()) < score:
                adjustment.write(str(score))
    except (OSError, ValueError):
        pass


def allow_many_descriptors(most: int = 65_536) -> None:
    """Raise the soft limit on open descriptors as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def reap(pid: int) -> os.waitid_result | None:
    """Return the wait status of a dead child and forget it; None while it lives.

    Raises:
        ChildProcessError: it is no child of ours any more: somebody else took its status.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def signal_process(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a child that has not been reaped. A process that is gone is no error."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once the process is dead; None where the system has none to give."""
    if not HAS_PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # An old kernel, a container that forbids it, or no descriptor left: SIGCHLD tells as well.


def dead_strangers(known: Container[int]) -> Iterator[int]:
    """Yield the pids of dead children that nobody here has started: to PID 1 the kernel hands every orphan (160), to a
    subreaper those of its own descendants."""
    if os.getpid() != 1 and not _adopts:
        return
    for pid in children():
        if pid in known:
            continue
        try:
            dead = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if dead is not None:
            yield pid


def kill_strangers(known: Container[int]) -> None:
    """Kill the children that came to us as orphans: what was below a process that is dead now, however it had hidden.
    Those that are dead are reaped. For subreapers; PID 1 may have got them from anywhere."""
    if os.getpid() == 1 or not _adopts:
        return
    for pid in children():
        if pid in known or pid in _own_before:
            continue
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        except (ProcessLookupError, ChildProcessError, PermissionError):
            continue


def children() -> list[int]:
    """Return the pids of the children of this thread's process; empty where the system does not list them."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP or a debugger. False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as status:
            return status.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False
