"""Traces observed on the sibling's schema, replayed on ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.vectors import Replay

if TYPE_CHECKING:
    import psycopg

VECTORS = sorted((Path(__file__).parent.parent / "vectors").glob("*.json"))


@pytest.mark.parametrize("file", VECTORS, ids=lambda file: file.stem)
def test_ends_in_the_same_state_after_every_call(file: Path, connection: psycopg.Connection[Any]) -> None:
    Replay(connection).play(json.loads(file.read_text()))


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 40
