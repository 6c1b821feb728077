"""Replay traces observed on the sibling's schema: call by call, the whole state compared after each."""

from __future__ import annotations

import json
import math
import re
import uuid
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb, set_json_loads

LOCAL_SECRET = "super-secret-jwt-token-with-at-least-32-characters-long"

#: Columns whose value is left out because it is of no interest, or only one of the siblings has it.
IGNORED = {
    "flows": {"flow_slug", "created_at", "flow_type"},
    "steps": {"flow_slug", "step_slug", "created_at"},
    "deps": {"flow_slug", "dep_slug", "step_slug", "created_at"},
    "runs": {"run_id"},
    "step_states": {"run_id", "step_slug"},
    "step_tasks": {"run_id", "step_slug", "task_index"},
    "workers": {"worker_id"},
    "worker_functions": {"function_name", "created_at"},
}
KEYS = {
    "flows": ("flow_slug",),
    "steps": ("flow_slug", "step_slug"),
    "deps": ("flow_slug", "dep_slug", "step_slug"),
    "runs": ("run_id",),
    "step_states": ("run_id", "step_slug"),
    "step_tasks": ("run_id", "step_slug", "task_index"),
    "workers": ("worker_id",),
    "worker_functions": ("function_name",),
}

SETUP = """
create schema realtime;
create table realtime.messages (
  id bigint generated always as identity, payload jsonb, event text, topic text, private boolean,
  inserted_at timestamptz not null default clock_timestamp());
create function realtime.send(payload jsonb, event text, topic text, private boolean default true)
returns void language sql as $$
  insert into realtime.messages (payload, event, topic, private) values (payload, event, topic, private)
$$;
"""


class Replay:
    """One vector on one fresh database. Names stand for ids and times in both directions."""

    def __init__(self, connection: psycopg.Connection[dict[str, Any]]) -> None:
        self.connection = connection
        connection.row_factory = dict_row
        set_json_loads(_load_json, connection)
        self.names: dict[str, str] = {}  # uuid -> name
        self.ids: dict[str, uuid.UUID] = {}  # name -> uuid
        self.marks: dict[int, datetime] = {}  # call -> its now()
        self.expected: dict[str, dict[str, Any]] = {}
        self.messages: dict[tuple[str, int], str] = {}
        self.started: set[str] = set()
        self.seen_events = 0

    def play(self, vector: dict[str, Any]) -> None:
        for number, call in enumerate(vector["calls"], start=1):
            where = f"{vector['name']}, call {number} ({call['call']})"
            self._one(number, call, where)

    def _one(self, number: int, call: dict[str, Any], where: str) -> None:
        error: psycopg.Error | None = None
        result: list[dict[str, Any]] = []
        try:
            with self.connection.transaction():
                self.marks[number] = self._query("select now() as t")[0]["t"]
                result = self._perform(call)
        except psycopg.Error as caught:
            error = caught
        if "error" in call:
            assert error is not None, f"{where}: no error, expected {call['error']}"
            shown = self._error(error, call["error"])
            assert shown == call["error"], f"{where}: failed with {shown}, expected {call['error']}"
        elif error is not None:
            raise AssertionError(f"{where}: {error}") from error

        state = self._state(number)
        for table, rows in call.get("changes", {}).items():
            self.expected.setdefault(table, {}).update(rows)
        for table, keys in call.get("removed", {}).items():
            for key in keys:
                del self.expected[table][key]
        self._compare(state, where)
        if "returns" in call:
            returned = self._returned(call, result, state)
            assert returned == call["returns"], f"{where}: returned {returned}, expected {call['returns']}"
        events = self._events(number)
        assert _grouped(events) == _grouped(call.get("events", [])), where

    # Calls

    def _perform(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        name, args = call["call"], dict(call.get("args", {}))
        if name == "be_local":
            secret = LOCAL_SECRET if args["local"] else ""
            self._query("select set_config('app.settings.jwt_secret', %s, false)", [secret])
            return []
        if name == "sql":
            self.connection.execute(args["statement"])
            return []
        if name == "pass_time":
            self._pass_time(args["seconds"])
            return []
        if name == "register_worker":
            self._query(
                "insert into pgflow.workers (worker_id, queue_name, function_name) values (%s, '', 'fn') returning 1",
                [self._id(args["worker_id"])],
            )
            return []
        if name.startswith("pgmq."):
            function, schema = name.removeprefix("pgmq."), "pgmq"
            return self._function(schema, function, {k: self._argument(k, v) for k, v in args.items()}, True)
        if name == "claim":
            read = self._query(
                "select msg_id from pgmq.read(queue_name => %s, vt => %s, qty => %s)",
                [args["queue_name"], args.get("vt", 5), args.get("qty", 1000)],
            )
            ids = [row["msg_id"] for row in read]
            names = sorted(self._message_name(args["queue_name"], i) for i in ids)
            assert names == sorted(call.get("read", [])), f"read {names}"
            name = "start_tasks"
            selector = {"step_slug": args["step_slug"]} if "step_slug" in args else {}
            args = {
                "flow_slug": args["flow_slug"],
                "msg_ids": ids,
                "worker_id": args.get("worker_id", "worker1"),
                "queue_name": args["queue_name"],
                **selector,
            }
        positional = name in ("ensure_flow_compiled", "mark_worker_stopped")
        values = {k: self._argument(k, v, args.get("queue_name")) for k, v in args.items()}
        if name == "complete_task" and "output" not in values:
            values["output"] = None
        if name == "ensure_flow_compiled" and ("queue_mode" in values or "route_map" in values):
            values = {
                "flow_slug": values["flow_slug"],
                "shape": values["shape"],
                "queue_mode": values.get("queue_mode"),
                "route_map": values.get("route_map"),
            }
        for missing in _required(name):
            values.setdefault(missing, None)
        return self._function("pgflow", name, values, positional)

    def _function(self, schema: str, name: str, values: dict[str, Any], positional: bool) -> list[dict[str, Any]]:
        casts = {"msg_ids": "bigint[]", "run_id": "uuid", "worker_id": "uuid", "p_run_id": "uuid"}
        parts = []
        for key in values:
            value: sql.Composable = sql.Placeholder()
            kind = casts.get(key, "jsonb" if isinstance(values[key], Jsonb) else _kind(key, values[key]))
            value = value + sql.SQL("::") + sql.SQL(kind)
            parts.append(value if positional else sql.SQL("{} => {}").format(sql.Identifier(key), value))
        statement = sql.SQL("select * from {}({})").format(sql.Identifier(schema, name), sql.SQL(", ").join(parts))
        return self._query(statement, list(values.values()))

    def _argument(self, key: str, value: Any, queue: str | None = None) -> Any:
        if key in ("run_id", "worker_id", "p_run_id") and value is not None:
            return self._id(value)
        if key == "msg_ids" and value is not None:
            return [v if isinstance(v, int) else self._message_id(queue, v) for v in value]
        if key in JSON_ARGUMENTS:
            if value is None and key in ("route_map",):
                return None
            return Jsonb(value)
        return value

    def _pass_time(self, seconds: int) -> None:
        columns = self._query(
            "select table_schema, table_name, array_agg(column_name::text) as names from information_schema.columns "
            "join information_schema.tables using (table_schema, table_name) "
            "where data_type = 'timestamp with time zone' and table_type = 'BASE TABLE' and (table_schema = 'pgflow' "
            "or table_schema = 'pgmq' and (table_name like 'q\\_%%' or table_name like 'a\\_%%')) "
            "and column_name <> 'last_read_at' group by 1, 2"
        )
        for table in columns:
            assignments = sql.SQL(", ").join(
                sql.SQL("{0} = {0} - make_interval(secs => {1})").format(sql.Identifier(c), sql.Literal(seconds))
                for c in table["names"]
            )
            self.connection.execute(
                sql.SQL("update {} set {}").format(
                    sql.Identifier(table["table_schema"], table["table_name"]), assignments
                )
            )
        latest = max(self.marks)
        for number in self.marks:
            if number != latest:
                self.marks[number] -= timedelta(seconds=seconds)

    # Names

    def _id(self, name: str) -> uuid.UUID:
        if name not in self.ids:
            self.ids[name] = uuid.uuid4()
            self.names[str(self.ids[name])] = name
        return self.ids[name]

    def _message_id(self, queue: str | None, name: str) -> int:
        for (of_queue, message_id), known in self.messages.items():
            if known == name and (queue is None or of_queue == queue):
                return message_id
        run, step, index = name.split("/")
        row = self._query(
            "select message_id from pgflow.step_tasks where run_id = %s and step_slug = %s and task_index = %s",
            [self._id(run), step, int(index)],
        )
        return int(row[0]["message_id"]) if row else -1

    def _message_name(self, queue: str, message_id: int) -> str:
        return self.messages[(queue.lower(), message_id)]

    def _time(self, value: datetime) -> str:
        before = [n for n, mark in self.marks.items() if mark <= value]
        number = max(before)
        return f"@{number}" if self.marks[number] == value else f"@{number}~"

    def _value(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return self._time(value)
        if isinstance(value, uuid.UUID):
            return self.names.get(str(value), str(value))
        if isinstance(value, timedelta):
            return str(value)
        return value

    def _text(self, text: str) -> str:
        for value, name in self.names.items():
            text = text.replace(value, name)
        return text

    # What is there

    def _query(self, statement: Any, args: list[Any] | None = None) -> list[dict[str, Any]]:
        cursor = self.connection.execute(statement, args)
        return cursor.fetchall() if cursor.description else []

    def _state(self, number: int) -> dict[str, dict[str, Any]]:
        for row in self._query("select run_id from pgflow.runs order by started_at"):
            run_id = str(row["run_id"])
            if run_id not in self.names:
                name = f"run{len(self.started) + 1}"
                self.names[run_id] = name
                self.ids[name] = row["run_id"]
            self.started.add(run_id)
        state: dict[str, dict[str, Any]] = {
            "queues": {r["queue_name"]: {} for r in self._query("select queue_name from pgmq.list_queues()")}
        }
        for table, keys in KEYS.items():
            state[table] = {}
            for row in self._query(sql.SQL("select * from {}").format(sql.Identifier("pgflow", table))):
                key = "/".join(str(self._value(row[k])) for k in keys)
                shown = {}
                for column, value in row.items():
                    if column not in IGNORED[table] and value is not None:
                        shown[column] = self._value(value)
                if table == "step_tasks" and row["message_id"] is not None:
                    name = self.messages.setdefault((row["queue_name"], row["message_id"]), key)
                    shown["message_id"] = "own" if name == key else f"message {name}"
                state[table][key] = shown
        state["messages"] = self._read_messages()
        return state

    def _read_messages(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for queue in self._query("select queue_name from pgmq.list_queues()"):
            name = queue["queue_name"]
            for where, prefix in (("live", "q"), ("archived", "a")):
                rows = self._query(
                    sql.SQL("select * from {} order by msg_id").format(
                        sql.Identifier("pgmq", f"{prefix}_{name.lower()}")
                    )
                )
                for row in rows:
                    body = json.loads(self._text(json.dumps(row["message"])))
                    key = self.messages.get((name.lower(), row["msg_id"]))
                    if key is None:
                        key = f"extra{1 + sum(1 for n in self.messages.values() if n.startswith('extra'))}"
                        self.messages[(name.lower(), row["msg_id"])] = key
                    shown = {
                        "queue": name,
                        "where": where,
                        "read_ct": row["read_ct"],
                        "visible": row["vt"],
                        "message": body,
                    }
                    if row["headers"] is not None:
                        shown["headers"] = row["headers"]
                    found[key] = shown
        return found

    def _compare(self, state: dict[str, dict[str, Any]], where: str) -> None:
        for table in state:
            expected = self.expected.get(table, {})
            assert sorted(state[table]) == sorted(expected), f"{where}: keys of {table}"
            for key, row in expected.items():
                actual = dict(state[table][key])
                if table == "messages":
                    actual["visible"] = self._visible(row["visible"], actual["visible"])
                assert actual == row, f"{where}: {table} {key}"

    def _visible(self, expected: str, actual: datetime) -> str:
        found = re.fullmatch(r"@(\d+)([+-]\d+)s", expected)
        assert found, expected
        since = (actual - self.marks[int(found[1])]).total_seconds()
        return f"@{found[1]}{math.floor(since):+d}s"

    def _events(self, number: int) -> list[dict[str, Any]]:
        rows = self._query("select * from realtime.messages where id > %s order by id", [self.seen_events])
        events = []
        for row in rows:
            self.seen_events = row["id"]
            payload = json.loads(self._text(json.dumps(row["payload"])))
            for key in payload:
                if key.endswith("_at") and isinstance(payload[key], str):
                    payload[key] = self._time(datetime.fromisoformat(payload[key]))
            event = {"event": row["event"], "payload": payload}
            if row["topic"] != f"pgflow:run:{self.ids[payload['run_id']]}":
                event["topic"] = row["topic"]
            if row["private"]:
                event["private"] = True
            events.append(event)
        return events

    def _error(self, error: psycopg.Error, expected: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"sqlstate": error.sqlstate, "message": self._text(error.diag.message_primary or "")}
        if error.diag.constraint_name:
            shown["constraint"] = error.diag.constraint_name
        if "detail" in expected:
            shown["detail"] = error.diag.message_detail
        if "hint" in expected:
            shown["hint"] = error.diag.message_hint
        return shown

    def _returned(self, call: dict[str, Any], result: list[dict[str, Any]], state: dict[str, Any]) -> Any:
        name = call["call"]
        if name in ("claim", "start_tasks"):
            return [self._claimed(row) for row in sorted(result, key=self._task_key)]
        if name in ("get_run_with_states", "start_flow_with_states"):
            answer = next(iter(result[0].values()))
            return None if answer is None else self._run_with_states(answer)
        rows = {"create_flow": "flows", "add_step": "steps", "start_flow": "runs"}
        table = rows.get(name, "step_tasks" if name in ("complete_task", "fail_task") else None)
        if table:
            return [self._row(table, row, state) for row in result]
        if len(result) == 1 and len(result[0]) == 1:
            return next(iter(result[0].values()))
        return result

    def _row(self, table: str, row: dict[str, Any], state: dict[str, Any]) -> Any:
        key = "/".join(str(self._value(row[k])) for k in KEYS[table])
        shown = {c: self._value(v) for c, v in row.items() if c not in IGNORED[table] and v is not None}
        if "message_id" in shown:
            name = self.messages[(row["queue_name"], row["message_id"])]
            shown["message_id"] = "own" if name == key else f"message {name}"
        return f"{table} {key}" if shown == state[table].get(key) else {"of": f"{table} {key}", **shown}

    def _run_with_states(self, answer: dict[str, Any]) -> dict[str, Any]:
        run = self.names[answer["run"]["run_id"]]
        steps = {f"{run}/{s['step_slug']}": f"step_states {run}/{s['step_slug']}" for s in answer["steps"]}
        return {"run": f"runs {run}", "steps": steps}

    def _task_key(self, row: dict[str, Any]) -> tuple[str, str, int]:
        return (self.names[str(row["run_id"])], row["step_slug"], row["task_index"])

    def _claimed(self, row: dict[str, Any]) -> dict[str, Any]:
        task = "/".join(str(p) for p in self._task_key(row))
        return {
            "task": task,
            "message": "own" if task in self.messages.values() else row["msg_id"],
            "flow_slug": row["flow_slug"],
            "input": row["input"],
            "flow_input": row["flow_input"],
        }


JSON_ARGUMENTS = {
    "input",
    "output",
    "shape",
    "p_shape",
    "route_map",
    "required_input_pattern",
    "forbidden_input_pattern",
    "message",
    "msg",
}


def _required(name: str) -> tuple[str, ...]:
    return {
        "start_flow": ("flow_slug", "input"),
        "start_flow_with_states": ("flow_slug", "input"),
        "complete_task": ("run_id", "step_slug", "task_index", "output"),
        "fail_task": ("run_id", "step_slug", "task_index", "error_message"),
    }.get(name, ())


def _kind(key: str, value: Any) -> str:
    if key in JSON_ARGUMENTS:
        return "jsonb"
    if key == "base_delay" and isinstance(value, float):
        return "numeric"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "numeric"
    if isinstance(value, list):
        return "text[]"
    if value is None and key in ("max_attempts", "timeout", "start_delay", "base_delay", "task_index"):
        return "int"
    if value is None and key == "deps_slugs":
        return "text[]"
    return "text"


def _load_json(data: bytes | str) -> Any:
    value = json.loads(data)
    return "JSON null" if value is None else value


def _grouped(events: list[dict[str, Any]]) -> list[list[str]]:
    """Sort neighbours of one kind: their order among each other is not defined."""
    groups: list[tuple[str, list[str]]] = []
    for event in events:
        kind = event["payload"]["event_type"]
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(json.dumps(event, sort_keys=True))
    return [sorted(members) for _, members in groups]
