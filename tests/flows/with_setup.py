"""A flow with a setup function."""

from __future__ import annotations

import os
from typing import Any

from pgflow_otp import Flow

prepared = Flow("prepared", max_attempts=1, timeout=10)
_made_in: list[int] = []


@prepared.setup
def prepare() -> None:
    if os.path.exists(os.environ.get("PGFLOW_TEST_BREAK_SETUP", "")):
        raise RuntimeError("no model to load")
    _made_in.append(os.getpid())


@prepared.map()
def work(item: Any) -> Any:
    return {"setups": len(_made_in), "same": _made_in[0] == os.getpid(), "pid": os.getpid()}
