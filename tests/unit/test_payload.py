"""JSON passes unchanged in both directions, or the error says where the trouble is."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import re
import uuid
from typing import Any

import pytest

from pgflow_otp.errors import PayloadError
from pgflow_otp.flow.payload import decode, encode, storable


@pytest.mark.parametrize(
    "value",
    [
        None, False, True, 0, 0.0, "", [], {}, "null", "123", '"x"', "äöü😀", 2**53 + 1, 2**70, -(2**64), 1e300,
        0.1, [None, {"a": [1, 2.5, "x"]}], {"": {"nested": [[[]]]}},
    ],
)  # fmt: skip
def test_a_value_comes_back_unchanged(value: Any) -> None:
    again = decode(encode(value))
    assert again == value
    assert type(again) is type(value)


def test_integers_beyond_64_bits_are_exact_inside_structures() -> None:
    assert decode(encode({"n": [2**200, 1]})) == {"n": [2**200, 1]}


def test_deep_nesting_passes() -> None:
    value: Any = 1
    for _ in range(500):
        value = [value]
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "output is nan"),
        ({"a": [1, float("inf")]}, "output['a'][1] is inf"),
        ({"a": {1, 2}}, "output['a'] is a set"),
        ({1: 2}, "key 1 (int)"),
        ([{"x": "a\x00b"}], "output[0]['x'] is a string with a NUL"),
        ({"a\x00": 1}, "NUL"),
        ("\ud800", "lone surrogate"),
        ((n for n in (1,)), "generator"),
        (object(), "object"),
        (b"bytes", "bytes"),
    ],
)
def test_what_json_cannot_hold_is_named_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(PayloadError) as caught:
        encode(value)
    assert words in str(caught.value)


def test_a_value_that_contains_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadError, match="contains itself"):
        encode(value)


def test_the_documented_conversions() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    key = uuid.UUID(int=5)
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    assert decode(encode([Point(1), key, moment, (1, 2)])) == [{"x": 1}, str(key), "2026-01-02T03:04:05+00:00", [1, 2]]
    assert decode(encode({"big": 2**70, "key": key})) == {"big": 2**70, "key": str(key)}


@pytest.mark.parametrize("raw", [b"", b"{broken", b"[1,", b"nope"])
def test_what_is_not_json_is_an_error(raw: bytes) -> None:
    with pytest.raises(PayloadError, match="not JSON"):
        decode(raw)


def test_error_texts_are_made_storable() -> None:
    assert storable("a\x00b\ud800") == "a\\x00b\\ud800"
    assert len(storable("x" * 100_000, 1000)) < 1100


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Price:
    amount: decimal.Decimal
    ratio: float = 1.0


class Model:
    """Looks like a pydantic model."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return {"mode": mode, "when": "2026-01-02"}


class Array:
    """Looks like a numpy array of a kind that orjson does not know."""

    def tolist(self) -> list[float]:
        return [1.5, float("nan")]


Array.__module__ = "numpy"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (decimal.Decimal("1.10"), '"1.10"'),
        (Price(decimal.Decimal("3")), '{"amount":"3","ratio":1.0}'),
        ([Colour.RED, 2**70], f'["red",{2**70}]'),
        (Model(), '{"mode":"json","when":"2026-01-02"}'),
        ({"at": datetime.datetime(2026, 1, 2, 3, 4, 5), "big": 2**70}, f'{{"at":"2026-01-02T03:04:05","big":{2**70}}}'),
        ((uuid.UUID(int=5), datetime.date(2026, 1, 2)), '["00000000-0000-0000-0000-000000000005","2026-01-02"]'),
    ],
    ids=repr,
)
def test_conversions_are_as_documented(value: Any, text: str) -> None:
    assert encode(value) == text.encode()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": decimal.Decimal("NaN")}, "output['a'] is NaN, which JSON cannot hold"),
        ([Price(decimal.Decimal(1), float("inf"))], "output[0]['ratio'] is inf, which JSON cannot hold"),
        (Array(), "output[1] is nan, which JSON cannot hold"),
        ({"g": (n for n in range(3))}, "output['g'] is a generator, which has no JSON form"),
        ({"b": [b"x"]}, "output['b'][0] is a bytes, which has no JSON form"),
        ({1: "x"}, "output has the key 1 (int); keys have to be strings"),
        ({"deep": {"t": type}}, "output['deep']['t'] is a type, which has no JSON form"),
    ],
    ids=repr,
)
def test_what_has_no_json_form_is_named_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(PayloadError, match=re.escape(words)):
        encode(value)


def test_a_coroutine_that_nobody_awaited_is_named() -> None:
    async def later() -> None: ...

    forgotten = later()
    with pytest.raises(PayloadError, match=r"output\[0\] is a coroutine, which has no JSON form; it has to be awaited"):
        encode([forgotten])
    forgotten.close()
