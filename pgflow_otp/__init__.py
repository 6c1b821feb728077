"""pgflow-otp: PostgreSQL workflows on a supervised tree of processes."""

from pgflow_otp.client import Client, Run, StepState
from pgflow_otp.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    FlowDefinitionError,
    FlowNotFound,
    NonRetryable,
    PayloadError,
    PgflowError,
    RunFailed,
    RunNotFound,
    SchemaError,
    TargetError,
    TreeStartError,
)
from pgflow_otp.flow.context import Context
from pgflow_otp.flow.cron import Cron
from pgflow_otp.flow.dsl import Flow, Job, job
from pgflow_otp.runtime.handle import Supervisor
from pgflow_otp.settings import Settings

__all__ = [
    "Client",
    "ConfigurationError",
    "Context",
    "Cron",
    "DatabaseUnavailable",
    "Flow",
    "FlowDefinitionError",
    "FlowNotFound",
    "Job",
    "NonRetryable",
    "PayloadError",
    "PgflowError",
    "Run",
    "RunFailed",
    "RunNotFound",
    "SchemaError",
    "Settings",
    "StepState",
    "Supervisor",
    "TargetError",
    "TreeStartError",
    "job",
]
