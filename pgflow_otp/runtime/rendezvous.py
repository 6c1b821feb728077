"""Where a running tree is found on its host: a private directory with a lock and a socket for each tree.

The lock (flock) tells whether a tree lives, whatever files it has left: the kernel lets go of it when the root dies.
The directory does not depend on a login session, so that a tree started by a service manager is found from a shell.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pgflow_otp.errors import ConfigurationError, TreeNotFound, TreeStartError
from pgflow_otp.settings import DEFAULT_NAME

#: Names the directory, where the default does not suit.
DIRECTORY_VARIABLE = "PGFLOW_RUNTIME_DIR"
#: What the kernel takes as the path of a socket.
_LONGEST_PATH = 103
#: Seconds another tree that sweeps up may hold a lock.
_PATIENCE = 0.2


def runtime_directory() -> Path:
    """Return the directory: PGFLOW_RUNTIME_DIR, else /tmp/pgflow-otp-UID."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"/tmp/pgflow-otp-{os.getuid()}")


def _prepared_directory() -> Path:
    """Return the directory, made if need be; nobody else may write to it, or read it.

    Raises:
        ConfigurationError: it cannot be made, or belongs to somebody else.
    """
    path = runtime_directory()
    way_out = f"name another one in {DIRECTORY_VARIABLE}"
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        seen = path.lstat()
        if not stat.S_ISDIR(seen.st_mode):
            raise ConfigurationError(f"{path} is no directory; {way_out}")
        if seen.st_uid != os.getuid():
            raise ConfigurationError(f"{path} belongs to user {seen.st_uid}; {way_out}")
        if stat.S_IMODE(seen.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be used: {error.strerror}; {way_out}") from None
    return path


@dataclass(slots=True)
class Claim:
    """A tree's hold on its name: the lock, and the listening socket beside it."""

    path: Path
    lock: int
    listener: socket.socket

    def release(self) -> None:
        """Take the files away and let go of the name."""
        self.listener.close()
        _remove(self.path)
        os.close(self.lock)


def claim(name: str) -> Claim:
    """Take a name for this tree and listen; what dead trees left behind is taken away.

    Raises:
        TreeStartError: a tree of that name runs.
        ConfigurationError: the directory cannot be used.
    """
    directory = _prepared_directory()
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigurationError(f"the path of the control socket is too long: {path}")
    try:
        lock = _take_lock(path, _PATIENCE)
        if lock is None:
            raise TreeStartError(_taken(name, path))
        for other in directory.glob("*.sock"):
            if other != path:
                _sweep(other)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        _unlink(path)
        return Claim(path, lock, _listen(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be used: {error.strerror}") from None


def check_free(name: str) -> None:
    """See early whether a tree of that name runs; `claim` decides.

    Raises:
        TreeStartError: it does.
    """
    path = runtime_directory() / f"{name}.sock"
    if is_alive(path):
        raise TreeStartError(_taken(name, path))


def find_tree(name: str | None) -> Path:
    """Return the control socket of a running tree.

    Args:
        name: its name; None: the default name if such a tree runs, else the only one that runs.

    Raises:
        TreeNotFound: none runs, or it has to be said which one is meant.
    """
    running = running_trees()
    if name is not None and name in running:
        return running[name]
    if name is None and len(running) == 1:
        return next(iter(running.values()))
    if name is None and DEFAULT_NAME in running:
        return running[DEFAULT_NAME]
    if not running:
        which = "no tree" if name is None else f"no tree named '{name}'"
        raise TreeNotFound(f"{which} of this user runs on this host (looked in {runtime_directory()})")
    there = ", ".join(sorted(running))
    if name is None:
        raise TreeNotFound(f"several trees run: {there}; say which one with --name")
    raise TreeNotFound(f"no tree named '{name}' runs; running: {there}")


def running_trees() -> dict[str, Path]:
    """Return the control sockets of the trees of this user that are alive, by name."""
    try:
        sockets = sorted(runtime_directory().glob("*.sock"))
    except OSError:
        return {}
    return {path.stem: path for path in sockets if is_alive(path)}


def is_alive(path: Path) -> bool:
    """Whether a tree listens there. Asked of the socket: to try the lock could get in the way of a tree that starts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # It has too many callers just now.
        except OSError:
            return False
    return True


def _take_lock(path: Path, patience: float = 0.0) -> int | None:
    """Lock the file beside a socket; None when somebody else has it and keeps it for `patience` seconds."""
    lock_path = path.with_suffix(".lock")
    deadline = time.monotonic() + patience
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(descriptor):
            os.close(descriptor)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PATIENCE / 20)
            continue
        # Whoever had it may have taken the file away between our opening and our locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock_path.stat()):
                return descriptor
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Take away what a dead tree has left."""
    lock = _take_lock(path)
    if lock is not None:
        _remove(path)
        os.close(lock)


def _remove(path: Path) -> None:
    _unlink(path)
    _unlink(path.with_suffix(".lock"))


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        previous = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(16)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _taken(name: str, path: Path) -> str:
    pid = ""
    with suppress(OSError, ValueError):
        pid = f" (pid {int(path.with_suffix('.lock').read_text())})"
    return (
        f"a tree named '{name}' runs already{pid}; give this one another --name, "
        f"or stop that one: pgflow-otp stop --name {name}"
    )
