"""A flow whose module opens a file at import, as a pool of connections would a socket."""

from __future__ import annotations

import os
from typing import Any

from pgflow_otp import Flow

opens = Flow("opens", max_attempts=1, timeout=10)
_file = open(__file__)  # noqa: SIM115 - kept open on purpose


@opens.step()
def look(value: Any) -> Any:
    links = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) <= 2:
            continue
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {"first": _file.readline(), "sockets": sum("socket:" in link for link in links), "links": sorted(links)}
