"""The README's example of supervision without flows does what the README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def test_the_example_restarts_three_times_and_gives_up(tmp_path: Path) -> None:
    section = README.read_text().split("## Supervision alone")[1]
    example = tmp_path / "example.py"
    example.write_text(section.split("```python\n")[1].split("```")[0])
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 70
    assert sum("sensor child_terminated: exited with status 1: RuntimeError: north lost" in line for line in lines) == 4
    assert sum("sensor restarted" in line for line in lines) == 3
    assert "reached_max_restart_intensity; giving up" in lines[-1]
    assert done.stderr.count("RuntimeError: north lost") == 4
