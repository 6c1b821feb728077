"""What a slot needs of the pool it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.db.tasks import ClaimedTask


class SlotOwner(Protocol):
    """The pool, as its slots see it."""

    def send(self, header: dict[str, Any], *descriptors: int) -> None: ...
    @property
    def is_booted(self) -> bool: ...
    async def wait_booted(self) -> None: ...
    def load_flow_input(self, task: ClaimedTask, answer: Callable[[bytes], None]) -> None: ...
    def give_up_forkserver(self) -> None: ...
    def setup_failed(self, reason: str) -> None: ...
    @property
    def flow_slug(self) -> str: ...
