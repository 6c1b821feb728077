"""JSON in and out of handlers: any value unchanged, or an error that says where the trouble is.

orjson does the work. The standard library takes over where orjson would change a value: integers beyond 64 bits, which
it refuses to write and reads as floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from decimal import Decimal
from enum import Enum
from typing import Any

import orjson

from pgflow_otp.errors import PayloadError

_LONG_NUMBER = re.compile(rb"\d{18}")


def decode(raw: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        PayloadError: it is not JSON.
    """
    try:
        if not _LONG_NUMBER.search(raw):
            return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass  # The other parser decides: it has no limit on nesting or on the size of numbers.
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"not JSON: {error}") from None


def encode(value: Any, what: str = "output") -> bytes:
    """Return a value as JSON that PostgreSQL can store.

    Beside what JSON has: tuples become arrays; dataclasses and pydantic models objects; datetimes, dates and times ISO
    8601 texts; UUIDs texts; enums their values; Decimals texts, which keep every digit; numpy scalars and arrays those
    of JSON.

    Raises:
        PayloadError: part of it has no JSON form (a set, NaN, a key that is no string…). Names the path and the type.
    """
    try:
        raw = orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, RecursionError):
        return _encode_slowly(value, what)
    if b"null" in raw or b"\\u0000" in raw:
        _check(value, what)  # orjson writes NaN as null; PostgreSQL cannot store NUL.
    return raw


def _encode_slowly(value: Any, what: str) -> bytes:
    try:
        _check(value, what)
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_convert)
        return text.encode("utf-8")
    except RecursionError:
        raise PayloadError(f"{what} is nested too deeply, or contains itself") from None
    except (TypeError, ValueError) as error:
        raise PayloadError(f"{what} is not JSON encodable: {error}") from None


def _convert(value: Any) -> Any:
    try:
        return _plain(value)
    except TypeError:
        return orjson.loads(orjson.dumps(value))  # dates, UUIDs: what orjson knows and json does not


def _plain(value: Any) -> Any:
    """Return a value that orjson does not know as one that it does.

    Raises:
        TypeError: it has no JSON form.
    """
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise TypeError(f"{value} is no number that JSON can hold")
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    # By what they can do: neither has to be installed.
    if hasattr(type(value), "model_dump"):
        return value.model_dump(mode="json")
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _check(value: Any, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PayloadError(f"{path} is {value}, which JSON cannot hold")
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PayloadError(f"{path} has the key {key!r} ({type(key).__name__}); keys have to be strings")
            _check_text(key, f"a key of {path}")
            _check(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif not (value is None or isinstance(value, bool | int)):
        _check_object(value, path)


def _check_object(value: Any, path: str) -> None:
    if isinstance(value, Decimal) and not value.is_finite():
        raise PayloadError(f"{path} is {value}, which JSON cannot hold")
    try:
        plain = _plain(value)
    except TypeError:
        pass
    else:
        _check(plain, path)
        return
    try:
        orjson.dumps(value)
    except TypeError:
        name = type(value).__name__
        hint = "; it has to be awaited" if name == "coroutine" else ""
        raise PayloadError(f"{path} is a {name}, which has no JSON form{hint}") from None


def _check_text(text: str, path: str) -> None:
    if "\x00" in text:
        raise PayloadError(f"{path} is a string with a NUL character, which PostgreSQL cannot store")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PayloadError(f"{path} is a string with a lone surrogate, which is not valid Unicode") from None


def storable(text: str, longest: int = 20_000) -> str:
    """Return a text that PostgreSQL can store in a text column, cut in the middle if too long."""
    text = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n… {len(text) - longest} characters left out …\n{text[-half:]}"
