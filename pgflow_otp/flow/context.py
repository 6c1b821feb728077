"""What a handler is given beside its input."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from loguru import logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg
    from loguru import Logger


class Context:
    """The task a handler runs for.

    Attributes:
        run_id: id of the run.
        flow_slug: slug of the flow.
        step_slug: slug of the step.
        task_index: position of the item in a map; 0 for other steps.
        attempt: number of this attempt, from 1.
        logger: a loguru logger with run, step and attempt bound.
    """

    def __init__(
        self,
        *,
        run_id: UUID,
        flow_slug: str,
        step_slug: str,
        task_index: int,
        attempt: int,
        deadline: float,
        load_flow_input: Callable[[], Any],
        is_shutdown_requested: Callable[[], bool],
        connect: Callable[[], psycopg.Connection[Any]],
    ) -> None:
        self.run_id = run_id
        self.flow_slug = flow_slug
        self.step_slug = step_slug
        self.task_index = task_index
        self.attempt = attempt
        self.logger: Logger = logger.bind(flow=flow_slug, step=step_slug, run=str(run_id), attempt=attempt)
        self._deadline = deadline
        self._load_flow_input = load_flow_input
        self._is_shutdown_requested = is_shutdown_requested
        self._connect = connect
        self._flow_input: tuple[Any] | None = None
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def flow_input(self) -> Any:
        """The run's input, loaded on first use."""
        if self._flow_input is None:
            self._flow_input = (self._load_flow_input(),)
        return self._flow_input[0]

    @property
    def deadline(self) -> float:
        """Seconds left until the attempt times out; never below 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def shutdown_requested(self) -> bool:
        """Whether the worker is being stopped; a long handler may end early and say so by raising."""
        return self._is_shutdown_requested()

    def connection(self) -> psycopg.Connection[Any]:
        """Return a psycopg connection to the flow's database, opened on first use and closed after the task.

        Raises:
            psycopg.OperationalError: the database cannot be reached.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def close(self) -> None:
        """Close what the task opened. Called by the handler process."""
        if self._connection is not None and not self._connection.closed:
            self._connection.close()
        self._connection = None
