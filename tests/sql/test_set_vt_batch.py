"""pgflow.set_vt_batch (sql-contract 2.11)."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from support.engine import Engine


def set_vt(
    engine: Engine, messages: list[int | None] | None, offsets: list[int] | None, queue: str = "q"
) -> list[dict[str, Any]]:
    query = "select * from pgflow.set_vt_batch(%s, %s::bigint[], %s::int[]) order by msg_id"
    return engine.rows(query, queue, messages, offsets)


def queue_of(engine: Engine, messages: int = 3, name: str = "q") -> None:
    engine.execute("select pgmq.create(%s)", name)
    for number in range(messages):
        engine.execute("select pgmq.send(%s, %s, %s)", name, Jsonb({"n": number}), Jsonb({"h": number}))


def test_each_message_gets_the_offset_at_its_place(engine: Engine) -> None:
    queue_of(engine)
    before = engine.value("select clock_timestamp()")
    set_vt(engine, [3, 1], [300, 10])
    after = engine.value("select clock_timestamp()")
    moved = {m["msg_id"]: m["vt"] for m in engine.live("q")}
    for message, seconds in {3: 300, 1: 10}.items():
        assert before + timedelta(seconds=seconds) <= moved[message] <= after + timedelta(seconds=seconds)
    assert moved[2] < before


def test_returns_the_updated_rows_whole(engine: Engine) -> None:
    queue_of(engine)
    engine.execute("select pgmq.read('q', 0, 1)")
    before = {m["msg_id"]: m for m in engine.live("q")}
    returned = set_vt(engine, [1, 2], [10, 20])
    after = {m["msg_id"]: m for m in engine.live("q")}
    assert [list(row) for row in returned] == [["msg_id", "read_ct", "enqueued_at", "vt", "message", "headers"]] * 2
    for row in returned:
        message = row["msg_id"]
        assert row == {key: after[message][key] for key in row}
        assert row | {"vt": None} == {key: before[message][key] for key in row} | {"vt": None}
    assert [(row["message"], row["headers"], row["read_ct"]) for row in returned] == [
        ({"n": 0}, {"h": 0}, 1),
        ({"n": 1}, {"h": 1}, 0),
    ]


def test_time_is_the_clock_not_the_start_of_the_transaction(engine: Engine) -> None:
    queue_of(engine, 1)
    with engine.transaction() as own:
        own.execute("select now()")
        earlier = engine.value("select clock_timestamp()")
        assert set_vt(own, [1], [0])[0]["vt"] >= earlier


def test_an_offset_of_zero_makes_visible(engine: Engine) -> None:
    queue_of(engine, 1)
    assert engine.read("q", visibility=600) == [1]
    assert engine.read("q") == []
    set_vt(engine, [1], [0])
    assert engine.read("q") == [1]


def test_unknown_messages_are_silently_absent(engine: Engine) -> None:
    queue_of(engine)
    assert [row["msg_id"] for row in set_vt(engine, [99, 2, 98], [10, 20, 30])] == [2]


def test_messages_of_other_queues_are_left_alone(engine: Engine) -> None:
    queue_of(engine)
    queue_of(engine, name="other")
    before = engine.live("other")
    set_vt(engine, [1, 2, 3], [10, 10, 10])
    assert engine.live("other") == before


@pytest.mark.parametrize("queue", ["q", "nowhere"])
@pytest.mark.parametrize(("messages", "offsets"), [(None, [1]), ([1], None), (None, None)])
def test_a_null_array_is_an_empty_set_whatever_the_queue(
    engine: Engine, queue: str, messages: list[int | None] | None, offsets: list[int] | None
) -> None:
    queue_of(engine)
    before = engine.everything()
    assert set_vt(engine, messages, offsets, queue) == []
    assert engine.everything() == before


def test_empty_arrays_are_an_empty_set(engine: Engine) -> None:
    queue_of(engine)
    before = engine.everything()
    assert set_vt(engine, [], []) == []
    assert engine.everything() == before


@pytest.mark.parametrize(("messages", "offsets"), [([1, 2], [1]), ([1], [1, 2, 3]), ([], [1]), ([1], [])])
def test_arrays_of_different_lengths_are_refused(
    engine: Engine, messages: list[int | None], offsets: list[int]
) -> None:
    queue_of(engine)
    before = engine.everything()
    with pytest.raises(errors.RaiseException) as raised:
        set_vt(engine, messages, offsets)
    assert raised.value.diag.message_primary == (
        f"msg_ids length ({len(messages)}) must equal vt_offsets length ({len(offsets)})"
    )
    assert engine.everything() == before


def test_a_missing_queue_is_named(engine: Engine) -> None:
    with pytest.raises(errors.UndefinedTable) as raised:
        set_vt(engine, [1], [1], "nowhere")
    assert raised.value.sqlstate == "42P01"
    assert raised.value.diag.message_primary == 'relation "pgmq.q_nowhere" does not exist'


@pytest.mark.parametrize(("name", "called"), [("mixed", "MiXeD"), ("with-dash", "with-dash"), ("9 lives", "9 lives")])
def test_the_name_of_the_queue_is_formatted_and_quoted(engine: Engine, name: str, called: str) -> None:
    queue_of(engine, 1, name)
    assert [row["msg_id"] for row in set_vt(engine, [1], [10], called)] == [1]
