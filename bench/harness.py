"""What every benchmark shares: options, a server of its own, calibration, figures with their spread, JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgflow_otp.db import schema
from pgflow_otp.db.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Length of the calibration loop: its time says how fast this machine is at this moment.
CALIBRATION_ROUNDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    quick: bool
    json_file: Path | None
    dsn: str | None


@dataclass(slots=True)
class Figure:
    """One measured quantity: the median of its runs, and their extremes."""

    unit: str
    samples: list[float] = field(default_factory=list)
    calibrations: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        return {
            "value": round(self.value, 6),
            "min": round(min(self.samples), 6),
            "max": round(max(self.samples), 6),
            "unit": self.unit,
            "runs": len(self.samples),
            "calibration_ms": round(statistics.median(self.calibrations), 1),
        }


@dataclass
class Report:
    """The figures of one benchmark, and the targets they are held against."""

    name: str
    options: Options
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    targets: dict[str, tuple[str, float]] = field(default_factory=dict)
    calibrations: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions |= {"python": platform.python_version(), "pgflow-otp": version("pgflow-otp")}
        self.calibrate()

    def calibrate(self) -> float:
        """Time the calibration loop (ms). The figures that follow are shown beside it."""
        began = time.perf_counter()
        total = 0
        for number in range(CALIBRATION_ROUNDS):
            total += number
        self.calibrations.append((time.perf_counter() - began) * 1e3)
        return self.calibrations[-1]

    def add(self, key: str, unit: str, samples: float | Sequence[float]) -> None:
        """Add samples of a figure."""
        figure = self.figures.setdefault(key, Figure(unit))
        figure.samples += [samples] if isinstance(samples, (int, float)) else samples
        figure.calibrations.append(self.calibrations[-1])

    def ratio(self, key: str, figure: str, base: str) -> None:
        """Add how many times a figure another one is; nothing when one of them is missing."""
        if figure in self.figures and base in self.figures:
            self.add(key, "times", self.figures[figure].value / self.figures[base].value)

    def target(self, key: str, figure: str, at_most: float) -> None:
        """Hold a figure against an upper bound. Missing it changes no exit code: machines differ."""
        self.targets[key] = (figure, at_most)

    def finish(self) -> None:
        """Print the table, and write the JSON where it was asked for."""
        self.calibrate()
        print(f"\n{self.name}: calibration {statistics.median(self.calibrations):.0f} ms "
              f"({min(self.calibrations):.0f} to {max(self.calibrations):.0f})")  # fmt: skip
        width = max(len(key) for key in self.figures)
        for key, figure in self.figures.items():
            spread = f"({min(figure.samples):.3f} to {max(figure.samples):.3f}, {len(figure.samples)} runs"
            print(f"  {key:<{width}}  {figure.value:>10.3f} {figure.unit:<6} {spread}, "
                  f"calibration {statistics.median(figure.calibrations):.0f} ms)")  # fmt: skip
        judged = {}
        for key, (figure_key, bound) in self.targets.items():
            if figure_key in self.figures:
                value = self.figures[figure_key].value
                judged[key] = {"value": round(value, 6), "target": bound, "met": value <= bound}
                print(f"  target {key}: {value:.3f}, at most {bound}: {'met' if value <= bound else 'MISSED'}")
        if self.options.json_file:
            content = {
                "name": self.name,
                "versions": self.versions,
                "settings": self.settings,
                "calibration_ms": [round(value, 1) for value in self.calibrations],
                "figures": {key: figure.as_json() for key, figure in self.figures.items()},
                "targets": judged,
            }
            self.options.json_file.write_text(json.dumps(content, indent=2) + "\n")


def parse_options(description: str) -> Options:
    """Read the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="at most about a minute, with smaller numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--dsn", help="a PostgreSQL on which databases may be created; default: an embedded one")
    given = parser.parse_args()
    return Options(given.quick, given.json, given.dsn)


@contextmanager
def server(options: Options) -> Iterator[str]:
    """Give the DSN of a server: the one asked for, else an embedded one that is gone afterwards."""
    if options.dsn:
        yield options.dsn
        return
    with tempfile.TemporaryDirectory(prefix="pgflow-bench-", ignore_cleanup_errors=True) as folder:
        embedded = EmbeddedServer(Path(folder), {"shared_buffers": "256MB", "max_wal_size": "4GB"})
        try:
            yield make_conninfo(embedded.acquire(), dbname="postgres")
        finally:
            embedded.release()


@contextmanager
def fresh_database(server_dsn: str) -> Iterator[str]:
    """Give the DSN of a new database that holds the schema; it is dropped afterwards."""
    name = sql.Identifier(f"pgflow_bench_{uuid.uuid4().hex[:8]}")
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(name))
        try:
            dsn = make_conninfo(server_dsn, dbname=name.as_string().strip('"'))
            with psycopg.connect(dsn, autocommit=True) as connection:
                schema.install(connection)
            yield dsn
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(name))


class Backend:
    """A connection, and the CPU time that its backend process has used."""

    def __init__(self, dsn: str) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self._schedstat = Path(f"/proc/{self.connection.info.backend_pid}/schedstat")

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def cpu_ms(self) -> float | None:
        """CPU time of the backend (ms); None when it runs on another machine."""
        try:
            return int(self._schedstat.read_text().split()[0]) / 1e6
        except OSError:
            return None
