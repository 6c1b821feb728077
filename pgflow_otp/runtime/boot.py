"""How a tree is started: what its root is told, and the command line of that process."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import orjson

from pgflow_otp.flow.target import Source
from pgflow_otp.settings import Settings


@dataclass(frozen=True, slots=True)
class BootConfig:
    """What the root is told by whoever starts it. Read from a descriptor: a DSN may hold a password.

    Attributes:
        targets: flow targets to serve.
        source: where the user's flows are found.
        dsn: the database.
        settings: the tree's settings.
        host: descriptor of the channel to the embedding process; None: nobody, signals rule alone.
        host_pid: pid of that process.
        embedded: descriptor of the embedded server's lock; the root lets go of it at its end.
    """

    targets: tuple[str, ...]
    source: Source
    dsn: str
    settings: Settings
    host: int | None = None
    host_pid: int | None = None
    embedded: int | None = None

    def as_bytes(self) -> bytes:
        objects = {target: base64.b64encode(data).decode() for target, data in self.source.objects.items()}
        return orjson.dumps(
            {
                "targets": self.targets,
                "search_path": self.source.search_path,
                "objects": objects,
                "dsn": self.dsn,
                "settings": self.settings.as_json(),
                "host": self.host,
                "host_pid": self.host_pid,
                "embedded": self.embedded,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> BootConfig:
        raw = orjson.loads(data)
        objects = {target: base64.b64decode(text) for target, text in raw["objects"].items()}
        return BootConfig(
            targets=tuple(raw["targets"]),
            source=Source(tuple(raw["search_path"]), objects),
            dsn=raw["dsn"],
            settings=Settings(**raw["settings"]),
            host=raw["host"],
            host_pid=raw["host_pid"],
            embedded=raw["embedded"],
        )


def command(package_parent: str, descriptor: int) -> list[str]:
    """Return the command line of a root process. The current directory is kept out of its import path: a queue.py of
    the user's must not stand in for the library's."""
    code = "import sys; sys.path.append(sys.argv[1]); from pgflow_otp.runtime.root import main; main(sys.argv[2])"
    return [sys.executable, "-P", "-c", code, package_parent, str(descriptor)]


def hand_over(config: BootConfig) -> int:
    """Return a descriptor that a root process reads its configuration from, however long it is. It may hold a password:
    it is kept in memory, or in a file without a name where the system has nothing better."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pgflow-otp")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
    with os.fdopen(descriptor, "wb", closefd=False) as sink:
        sink.write(config.as_bytes())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def user_source() -> Source:
    """Return where user modules are looked for: the current directory first, then what this process sees."""
    here = os.getcwd()
    return Source((here, *(entry for entry in sys.path if entry not in ("", here))))


def package_parent() -> str:
    """Return the folder that holds the package."""
    return str(Path(__file__).resolve().parent.parent.parent)
