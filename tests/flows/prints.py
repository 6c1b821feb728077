"""A flow that prints at import and in its handler."""

from __future__ import annotations

from typing import Any

from pgflow_otp import Flow

print("printed at import")
noisy = Flow("noisy")


@noisy.step()
def talk(value: Any) -> Any:
    print("printed by the handler")
    return value
