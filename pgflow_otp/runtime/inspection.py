"""Looking at a module of the user's in a process that is thrown away, so that nothing it does can hurt anybody."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson

from pgflow_otp.errors import ConfigurationError, PgflowError, TargetError
from pgflow_otp.flow.shape import shape_of
from pgflow_otp.flow.target import load_target, module_of
from pgflow_otp.otp import process
from pgflow_otp.otp.channel import readable
from pgflow_otp.otp.exit_reason import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgflow_otp.flow.dsl import Flow
    from pgflow_otp.flow.target import Source

#: MiB that a step's memory_mb has to leave beyond what the imported modules hold.
_MEMORY_TO_WORK_WITH = 8


@dataclass(frozen=True, slots=True)
class FlowInfo:
    """What the database and the tree need to know of a flow: plain data.

    Attributes:
        slug: the flow's slug.
        flow_type: "flow" or "job".
        target: module:attribute, where its handlers are found again.
        shape: JSON for ensure_flow_compiled.
    """

    slug: str
    flow_type: str
    target: str
    shape: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_target(target: str, source: Source, timeout: float) -> list[FlowInfo]:
    """Import a target in a throw-away process and return its flows.

    Args:
        target: module or module:attribute, or an object of the source.
        source: where it is found.
        timeout: seconds the import may take.

    Raises:
        TargetError, FlowDefinitionError (as ConfigurationError): one line that says why it cannot be used.
    """
    module = module_of(target)
    read, write = os.pipe()
    try:
        pid = process.fork(
            lambda: _inspect(target, source, write),
            keep=(write,),
            title=f"pgflow-otp: import of {module}",
            dies_with_parent=True,
        )
    finally:
        os.close(write)
    try:
        answer = _read_all(read, time.monotonic() + timeout)
    finally:
        os.close(read)
    if answer is None:
        process.signal_process(pid, signal.SIGKILL, group=True)
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    process.signal_process(pid, signal.SIGKILL, group=True)  # What the import may have started.
    os.waitpid(pid, 0)
    if answer is None:
        raise TargetError(f"importing {module} takes longer than boot_timeout ({timeout:g} s)")
    if not answer:
        assert status is not None  # waitid without WNOHANG
        exited = status.si_code == os.CLD_EXITED
        how = f"exited with status {status.si_status}" if exited else f"died by {signal_name(status.si_status)}"
        raise TargetError(f"importing {module} ended the process: it {how}")
    found = orjson.loads(answer)
    if "error" in found:
        raise ConfigurationError(found["error"])
    return [FlowInfo(**flow) for flow in found["flows"]]


def _inspect(target: str, source: Source, write: int) -> int:
    os.dup2(2, 1)
    try:
        flows = load_target(target, source)
        infos = [FlowInfo(flow.slug, flow.flow_type, name, shape_of(flow)).as_json() for name, flow in flows.items()]
        too_small = _memory_too_small(flows.values())
        empty = [flow.slug for flow in flows.values() if not flow.steps]
        if empty:
            answer: dict[str, Any] = {"error": f"flow '{empty[0]}' in {target} has no steps"}
        elif too_small:
            answer = {"error": too_small}
        else:
            answer = {"flows": infos}
    except PgflowError as error:
        answer = {"error": str(error)}
    data = orjson.dumps(answer)
    while data:
        data = data[os.write(write, data) :]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _memory_too_small(flows: Iterable[Flow]) -> str | None:
    """Say which step could not even start: this process has imported what its handler processes will have."""
    try:
        with open("/proc/self/status") as status:
            held = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) / 1024
    except (OSError, StopIteration, ValueError):
        return None
    least = math.ceil(held) + _MEMORY_TO_WORK_WITH
    for flow in flows:
        for step in flow.steps.values():
            if step.memory_mb is not None and step.memory_mb < least:
                return (
                    f"flow '{flow.slug}', step '{step.slug}': memory_mb is {step.memory_mb}, but a handler process of "
                    f"this module needs {held:.0f} MiB before it does anything; give it {least} or more"
                )
    return None


def _read_all(read: int, deadline: float) -> bytes | None:
    """Return what arrives until the end; None when that takes too long."""
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not readable(read, left):
            return None
        chunk = os.read(read, 65_536)
        if not chunk:
            return data
        data += chunk
