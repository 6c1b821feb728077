"""The command line, run as a user would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.processes import ours, titled, wait_for, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def pgflow(command: list[str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end, in the repository, with data kept in the test's folder."""

    def run(*arguments: str, cwd: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            cwd=cwd,
            env=environment_for(tmp_path, **environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


def environment_for(folder: Path, **more: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("PG") or k in ("PGFLOW_TEST_TOKEN", "PGFLOW_RUNTIME_DIR")
    }
    return {**kept, "XDG_DATA_HOME": str(folder / "data"), **more}


def test_the_census_of_the_standard_library(pgflow: Any, database: str) -> None:
    done = pgflow("run", "examples.source_census", "--dsn", database)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["rank"]
    assert report["modules"] > 300
    assert report["lines"] > 100_000
    assert len(report["largest"]) == 10
    assert report["largest"] == sorted(report["largest"], key=lambda m: -m["lines"])


def test_hostile_handlers_are_reported_and_nothing_is_left(pgflow: Any, database: str, token: str) -> None:
    done = pgflow("run", "examples.hostile", "--dsn", database)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert "SIGSEGV" in report["segfault"]["error"]
    assert report["hang"]["error"] == "Task timed out after 1s"
    assert "exited with status 42" in report["leave"]["error"]
    assert report["devour"]["error"].startswith("MemoryError")
    assert report["recover"]["output"] == "attempt 2 succeeded"
    assert ours(token) == []


@pytest.mark.parametrize(
    ("order", "charged", "notifications"),
    [(None, 66.9, 2), ({"order_id": 7, "items": [], "notify": ["a"]}, None, 0)],
)
def test_an_order_is_fulfilled_or_not(pgflow: Any, database: str, order: Any, charged: Any, notifications: int) -> None:
    done = pgflow("run", "examples.order_fulfilment", "--input", json.dumps(order), "--dsn", database)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["charged"] == charged
    assert len(summary["notifications"]) == notifications


def test_a_failed_run_ends_with_1_and_says_where_to_look(pgflow: Any, database: str) -> None:
    done = pgflow("run", "examples.order_fulfilment", "--input", "{}", "--dsn", database)
    assert done.returncode == 0
    done = pgflow("run", "examples.order_fulfilment", "--input", '{"items": []}', "--dsn", database)
    assert (done.returncode, done.stdout) == (1, "")
    assert "step 'validate': NonRetryable: an order needs an order_id" in done.stderr
    shown = next(line for line in done.stderr.splitlines() if "runs show" in line)
    details = pgflow("runs", "show", shown.split()[-1], "--dsn", database)
    assert details.returncode == 0
    assert "validate[0]: failed after 1 attempt(s)" in details.stdout
    as_json = pgflow("runs", "show", shown.split()[-1], "--json", "--dsn", database)
    assert json.loads(as_json.stdout)["status"] == "failed"


def test_what_user_code_prints_is_not_in_the_output(pgflow: Any, database: str) -> None:
    done = pgflow("run", "flows.prints", "--input", "5", "--dsn", database, cwd=REPOSITORY / "tests")
    assert json.loads(done.stdout) == {"talk": 5}
    assert "printed by the handler" in done.stderr


def test_the_input_may_come_from_a_file_or_standard_input(
    pgflow: Any, command: list[str], database: str, tmp_path: Path
) -> None:
    file = tmp_path / "input.json"
    file.write_text('"from a file"')
    done = pgflow("run", "flows.prints", "--input", f"@{file}", "--dsn", database, cwd=REPOSITORY / "tests")
    assert json.loads(done.stdout) == {"talk": "from a file"}
    piped = subprocess.run(
        [*command, "run", "flows.prints", "--input", "-", "--dsn", database],
        cwd=REPOSITORY / "tests",
        input=b'"from a pipe"',
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert json.loads(piped.stdout) == {"talk": "from a pipe"}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["run", "examples.nothing"], 78, "there is no module 'examples.nothing'"),
        (["run", "examples/hostile.py"], 78, "write the module's name: examples.hostile"),
        (["run", "examples.hostile:nope"], 78, "no attribute 'nope'; flows in it: 'hostile'"),
        (["run", "examples.hostile:ctypes"], 78, "is a module, not a Flow or Job"),
        (["run", "json"], 78, "module json holds no Flow or Job"),
        (["run", "a b"], 78, "'a b' is not a flow target"),
        (["run", "examples.hostile", "--input", "{broken"], 2, "'{broken' is not JSON"),
        (["run", "examples.hostile", "--input", "@/nowhere.json"], 2, "cannot read /nowhere.json"),
        (["run", "examples.hostile", "--input", "NaN"], 2, "input is nan, which JSON cannot hold"),
        (["run", "examples.hostile", "--dsn", ""], 78, "--dsn is empty"),
        (["run", "examples.hostile", "--dsn", "postgresql://me:secret@127.0.0.1:1/x"], 69, "Connection refused"),
        (["run", "examples.hostile", "--dsn", "nonsense"], 78, "--dsn is not a connection string"),
        (["run", "examples.hostile", "--max-concurrency", "0"], 78, "'max_concurrency' is 0"),
        (["run", "examples.hostile", "--max-concurrency", "x"], 2, "'x' is not a valid integer"),
        (["run"], 2, "Missing argument 'TARGET'"),
        (["start"], 2, "Missing option '--flows'"),
        (["start", "--flows", "examples.nothing"], 78, "there is no module 'examples.nothing'"),
        (["setup", "--dsn", "postgresql://me:secret@127.0.0.1:1/x"], 69, "cannot connect to PostgreSQL"),
        (["dance"], 2, "No such command 'dance'"),
    ],
)
def test_a_mistake_is_one_clear_line(pgflow: Any, arguments: list[str], status: int, words: str) -> None:
    done = pgflow(*arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error:")]) == 1


MODULES = {
    "bad_slug": ("from pgflow_otp import Flow\nFlow('my flow')", "the slug 'my flow' is not valid"),
    "bad_syntax": ("def (", "bad_syntax.py, line 1"),
    "bad_import": ("import nothing_like_it", "No module named 'nothing_like_it'"),
    "raises": ("raise RuntimeError('boom')", "RuntimeError: boom"),
    "exits": ("import sys; sys.exit(3)", "sys.exit(3)"),
    "dies": ("import os; os._exit(3)", "exited with status 3"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "died by SIGSEGV"),
    "hangs": ("import time; time.sleep(3600)", "takes longer than boot_timeout (1 s)"),
    "no_steps": ("from pgflow_otp import Flow\nf = Flow('f')", "flow 'f' in no_steps has no steps"),
    "twins": (
        "from pgflow_otp import Flow\na = Flow('f')\nb = Flow('F')\na.step('s')(print)\nb.step('s')(print)",
        "both have the slug",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_used_is_one_clear_line(pgflow: Any, tmp_path: Path, name: str) -> None:
    source, words = MODULES[name]
    (tmp_path / f"{name}.py").write_text(source)
    done = pgflow("run", name, "--boot-timeout", "1", cwd=tmp_path)
    assert done.returncode == 78, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_with_several_flows_asks_for_one(pgflow: Any) -> None:
    done = pgflow("run", "flows.zoo", cwd=REPOSITORY / "tests")
    assert done.returncode == 2
    assert "flows.zoo:one, flows.zoo:many" in done.stderr


def test_a_database_without_the_schema_names_the_command(pgflow: Any, empty_database: str) -> None:
    for arguments in (("run", "examples.hostile"), ("start", "--flows", "examples.hostile")):
        done = pgflow(*arguments, "--dsn", empty_database)
        assert done.returncode == 69, done.stderr
        assert "pgflow-otp setup" in done.stderr
    checked = pgflow("setup", "--check", "--dsn", empty_database)
    assert checked.returncode == 1
    assert "not installed" in checked.stdout
    assert pgflow("setup", "--dsn", empty_database).returncode == 0
    again = pgflow("setup", "--dsn", empty_database)
    assert "up to date already" in again.stdout
    assert pgflow("setup", "--check", "--dsn", empty_database).returncode == 0
    assert pgflow("check-schema", "--dsn", empty_database).returncode == 0


def test_faults_of_a_schema_are_listed_and_end_with_1(pgflow: Any, database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("drop table pgflow.worker_functions")
    done = pgflow("check-schema", "--dsn", database)
    assert done.returncode == 1
    assert "has 1 fault:" in done.stdout
    assert "table pgflow.worker_functions does not exist" in done.stdout


def test_printed_sql_installs_the_same_schema(pgflow: Any, empty_database: str) -> None:
    printed = pgflow("setup", "--print-sql")
    assert printed.returncode == 0
    with psycopg.connect(empty_database) as connection:
        connection.execute(printed.stdout.encode())
    assert pgflow("setup", "--check", "--dsn", empty_database).returncode == 0
    assert pgflow("check-schema", "--dsn", empty_database).returncode == 0


def test_a_data_folder_that_cannot_be_written_is_one_clear_line(pgflow: Any) -> None:
    done = pgflow("run", "examples.hostile", XDG_DATA_HOME="/dev/null/data")
    assert done.returncode == 78
    assert "cannot keep its data in /dev/null/data/pgflow-otp" in done.stderr
    assert "Traceback" not in done.stderr


def test_modules_of_the_user_do_not_stand_in_for_the_librarys(pgflow: Any, database: str, tmp_path: Path) -> None:
    for name in ("queue", "json", "selectors", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not me')")
    (tmp_path / "mine.py").write_text("from pgflow_otp import Flow\nf = Flow('mine')\nf.step('s')(lambda v: v)\n")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "pgflow-otp"), "run", "mine", "--input", "3", "--dsn", database],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, '{\n  "s": 3\n}\n'), done.stderr


def test_version_and_help(pgflow: Any) -> None:
    assert "0.1.0" in pgflow("--version").stdout
    for arguments in ([], ["run"], ["start"], ["setup"], ["runs"], ["runs", "show"], ["embedded"], ["check-schema"]):
        done = pgflow(*arguments, "--help")
        assert done.returncode == 0
        assert "Usage:" in done.stdout


def start(command: list[str], tmp_path: Path, *arguments: str, cwd: Path = REPOSITORY) -> subprocess.Popen[bytes]:
    with (tmp_path / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            cwd=cwd,
            env=environment_for(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def completed_tasks(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("select count(*) from pgflow.step_tasks where status = 'completed'").fetchone()
        return int(row[0]) if row else 0


def test_an_interrupted_run_goes_on_at_the_next_start(
    command: list[str], database: str, tmp_path: Path, token: str
) -> None:
    running = start(command, tmp_path, "run", "examples.source_census", "--dsn", database)
    wait_for(lambda: completed_tasks(database) > 20, "the census to be under way")
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) == 130
    assert ours(token) == []
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute("select run_id, status from pgflow.runs").fetchone()
        assert row
        assert row[1] == "started"
        left = connection.execute("select count(*) from pgflow.step_tasks where status = 'started'").fetchone()
        assert left == (0,)
        again = start(command, tmp_path, "start", "--flows", "examples.source_census", "--dsn", database)
        done = "select status from pgflow.runs"
        wait_for(lambda: connection.execute(done).fetchone() == ("completed",), "the run to go on to its end")
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 0


def test_a_census_survives_the_death_of_its_worker(
    command: list[str], database: str, tmp_path: Path, token: str
) -> None:
    running = start(command, tmp_path, "run", "examples.source_census", "--dsn", database)
    wait_for(lambda: completed_tasks(database) > 20, "the census to be under way")
    worker = titled(token, "worker:source_census")
    os.kill(worker[0], signal.SIGKILL)
    assert running.wait(90) == 0, (tmp_path / "log").read_text()


def test_start_becomes_the_root_and_stops_on_sigterm(
    command: list[str], database: str, tmp_path: Path, token: str
) -> None:
    running = start(command, tmp_path, "start", "--flows", "flows.zoo", "--dsn", database, cwd=REPOSITORY / "tests")
    wait_for(
        lambda: "ready: serving forked, greet, limited, many, one, patient" in (tmp_path / "log").read_text(),
        "the tree",
    )
    assert running.pid in titled(token, "pgflow-otp: supervisor [pgflow]")
    running.send_signal(signal.SIGUSR1)
    wait_for(lambda: "worker:patient: running pid" in (tmp_path / "log").read_text(), "the dump of the tree")
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


def test_start_hands_over_more_than_a_pipe_holds(command: list[str], database: str, tmp_path: Path, token: str) -> None:
    targets = [part for n in range(1_000) for part in ("--flows", f"flows.zoo:{'x' * 80}{n}")]
    line = ["start", "--dsn", database, "--flows", "flows.zoo:one", *targets]
    running = start(command, tmp_path, *line, cwd=REPOSITORY / "tests")
    wait_for(lambda: running.pid in titled(token, "pgflow-otp: supervisor [pgflow]"), "the root")
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


def test_start_goes_on_without_a_database(command: list[str], tmp_path: Path) -> None:
    dsn = f"host={tmp_path} user=postgres dbname=x"
    running = start(command, tmp_path, "start", "--flows", "flows.zoo:one", "--dsn", dsn, cwd=REPOSITORY / "tests")
    wait_for(lambda: "trying again" in (tmp_path / "log").read_text(), "the tree to wait")
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


def test_a_run_without_a_database_uses_the_embedded_one_and_leaves_nothing(pgflow: Any, tmp_path: Path) -> None:
    first = pgflow("run", "flows.prints", "--input", "1", cwd=REPOSITORY / "tests")
    assert first.returncode == 0, first.stderr
    assert "using the embedded PostgreSQL: postgresql://" in first.stderr
    assert json.loads(first.stdout) == {"talk": 1}
    assert "not running" in pgflow("embedded", "status").stdout
    again = pgflow("run", "flows.prints", "--input", "2", cwd=REPOSITORY / "tests")
    assert json.loads(again.stdout) == {"talk": 2}


def test_the_embedded_server_outlives_a_killed_run_and_is_taken_over(
    command: list[str], pgflow: Any, tmp_path: Path, token: str
) -> None:
    running = start(command, tmp_path, "start", "--flows", "flows.zoo:one", cwd=REPOSITORY / "tests")
    wait_for(lambda: "ready" in (tmp_path / "log").read_text(), "the tree")
    root = running.pid
    running.kill()
    running.wait()
    wait_for(lambda: not titled(token, "pgflow-otp:"), "the end of the tree")
    wait_gone(root)
    assert "not running" not in pgflow("embedded", "status").stdout
    again = pgflow("run", "flows.prints", "--input", "3", cwd=REPOSITORY / "tests")
    assert json.loads(again.stdout) == {"talk": 3}
    assert "not running" in pgflow("embedded", "status").stdout


def test_two_trees_share_the_embedded_server(command: list[str], pgflow: Any, tmp_path: Path) -> None:
    running = start(command, tmp_path, "start", "--flows", "flows.zoo:one", cwd=REPOSITORY / "tests")
    wait_for(lambda: "ready" in (tmp_path / "log").read_text(), "the tree")
    second = pgflow("run", "flows.prints", "--input", "4", cwd=REPOSITORY / "tests")
    assert json.loads(second.stdout) == {"talk": 4}
    assert "not running" not in pgflow("embedded", "status").stdout
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0
    assert "not running" in pgflow("embedded", "status").stdout


def test_the_module_can_be_run_with_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgflow_otp", "--version"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0


@pytest.mark.parametrize("moment", ["data.new", "data/postmaster.pid"])
def test_an_interrupt_while_the_embedded_server_starts_leaves_it_whole_and_stopped(
    command: list[str], pgflow: Any, tmp_path: Path, moment: str
) -> None:
    running = start(command, tmp_path, "run", "flows.prints", "--input", "1", cwd=REPOSITORY / "tests")
    wait_for(lambda: list((tmp_path / "data").glob(f"pgflow-otp/pg*/{moment}")), "the server to be under way")
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) == 130
    assert "not running" in pgflow("embedded", "status").stdout
    done = pgflow("run", "flows.prints", "--input", "2", cwd=REPOSITORY / "tests")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"talk": 2}), done.stderr


def test_closed_standard_descriptors_are_no_trouble(command: list[str], database: str, tmp_path: Path) -> None:
    shell = f"exec {' '.join(command)} run flows.prints --input 5 --dsn '{database}' --log-level info"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"{shell} {closed}"], cwd=REPOSITORY / "tests", capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, (closed, done.stderr)
        assert b"Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_one_clear_line(command: list[str], database: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "run", "flows.prints", "--input", "5", "--dsn", database],
            cwd=REPOSITORY / "tests",
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert b"the output could not be written: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
