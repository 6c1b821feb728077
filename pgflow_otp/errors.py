"""Every exception of the package. A class says whose mistake it was; its docstring is the default message."""

from __future__ import annotations


class PgflowError(Exception):
    """Something went wrong in pgflow-otp."""

    #: Exit status of a command that ends with this error (interface, section 3).
    exit_code = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class FlowDefinitionError(PgflowError):
    """A flow is declared wrongly."""

    exit_code = 78


class ConfigurationError(PgflowError):
    """A setting has a value that cannot work."""

    exit_code = 78


class TargetError(ConfigurationError):
    """A flow target could not be imported."""


class DatabaseUnavailable(PgflowError):
    """The database cannot be reached."""

    exit_code = 69


class SchemaError(PgflowError):
    """The database does not hold the schema this version needs; run pgflow-otp setup."""

    exit_code = 69


class FlowNotFound(PgflowError):
    """The database knows no such flow."""

    def __init__(self, flow_slug: str) -> None:
        super().__init__(
            f"flow '{flow_slug}' is not registered in this database; "
            f"start a worker for it once (pgflow-otp start --flows …) or check the name"
        )
        self.flow_slug = flow_slug


class RunNotFound(PgflowError):
    """The database knows no such run."""

    def __init__(self, run_id: object) -> None:
        super().__init__(f"there is no run {run_id}")
        self.run_id = run_id


class RunFailed(PgflowError):
    """A run failed. `run` holds it with its steps.

    Attributes:
        run: the failed Run.
    """

    def __init__(self, run: object, reason: str) -> None:
        super().__init__(reason)
        self.run = run


class PayloadError(PgflowError):
    """A value cannot be stored as JSON."""


class NonRetryable(PgflowError):
    """Raise it in a handler to fail its task for good, whatever attempts are left."""


class TreeStartError(PgflowError):
    """The tree could not start."""

    exit_code = 69


class TreeNotFound(PgflowError):
    """No tree of that name runs on this host."""

    exit_code = 69
