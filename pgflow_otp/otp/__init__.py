"""Supervision of operating-system processes, after Erlang/OTP. Knows neither SQL nor flows.

Statement numbers in this package refer to the list that the process tests quote.
"""

from pgflow_otp.otp.child import ChildContext
from pgflow_otp.otp.child_spec import ChildSpec, Flags, FlagsError, SpecError, SupervisorSpec, check_child_specs
from pgflow_otp.otp.exit_reason import ExitReason
from pgflow_otp.otp.hooks import Hooks
from pgflow_otp.otp.nested import run_supervisor
from pgflow_otp.otp.operation import Report
from pgflow_otp.otp.supervisor import Supervisor

__all__ = [
    "ChildContext",
    "ChildSpec",
    "ExitReason",
    "Flags",
    "FlagsError",
    "Hooks",
    "Report",
    "SpecError",
    "Supervisor",
    "SupervisorSpec",
    "check_child_specs",
    "run_supervisor",
]
