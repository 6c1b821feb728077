"""The embedded server: shared, private, and stopped by the last that leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psycopg

from pgflow_otp.db.embedded import EmbeddedServer


def test_it_starts_keeps_its_data_and_is_private(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with psycopg.connect(server.acquire(), autocommit=True) as connection:
        connection.execute("create table kept as select 1 as one")
    assert server.is_running()
    assert (server.root.stat().st_mode & 0o077) == 0
    server.release()
    server.release()
    assert not server.is_running()
    with psycopg.connect(server.acquire()) as connection:
        assert connection.execute("select one from kept").fetchone() == (1,)
    server.release()


def test_the_last_user_stops_it(tmp_path: Path) -> None:
    first, second = EmbeddedServer(tmp_path), EmbeddedServer(tmp_path)
    first.acquire()
    second.acquire()
    first.release()
    assert second.is_running()
    second.release()
    assert not second.is_running()


def test_many_may_start_it_at_once(tmp_path: Path) -> None:
    servers = [EmbeddedServer(tmp_path) for _ in range(3)]
    threads = [threading.Thread(target=server.acquire) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(server.is_running() for server in servers)
    for server in servers:
        server.release()
    assert not servers[0].is_running()


def test_a_half_made_data_folder_is_made_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.data.mkdir(parents=True)
    (server.data / "half").touch()
    server.acquire()
    server.release()


def test_a_path_with_blanks_and_quotes_works(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "it's a folder")
    with psycopg.connect(server.acquire()) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    with psycopg.connect(server.uri) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    server.release()


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    server = EmbeddedServer(deep)
    server.acquire()
    assert len(os.fsencode(server.socket_directory)) < 100
    assert (Path(server.socket_directory).stat().st_mode & 0o077) == 0
    server.release()
    server.socket_directory.rmdir()
