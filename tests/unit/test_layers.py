"""The layers, read off the imports; and the public surface."""

from __future__ import annotations

import ast
from pathlib import Path

import pgflow_otp

PACKAGE = Path(pgflow_otp.__file__).parent

#: What each layer may import. Arrows point downwards only.
ALLOWED = {
    "otp": {"otp"},
    "flow": {"flow", "errors"},
    "db": {"db", "errors"},
    "pool": {"pool", "otp", "flow", "db", "errors", "log"},
    "runtime": {"runtime", "pool", "db", "flow", "otp", "errors", "settings", "log", "client"},
    "cli": {"cli", "runtime", "client", "db", "flow", "otp", "errors", "settings"},
    "client": {"db", "flow", "errors"},
    "settings": {"errors"},
    "log": set(),
    "errors": set(),
}


def imports_of(file: Path) -> set[str]:
    """Return the layers a module imports at run time."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only and node.module:
            parts = node.module.split(".")
            if parts[0] == "pgflow_otp":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_arrows_point_downwards() -> None:
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        layer = relative.parts[0].removesuffix(".py")
        if layer in ALLOWED:
            assert imports_of(file) <= ALLOWED[layer], relative


def test_only_one_place_forks() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE) != Path("otp/process.py"):
            assert "os.fork(" not in file.read_text(), file


def test_no_module_is_longer_than_it_should_be() -> None:
    """Files stay within what one reads at a sitting."""
    for file in PACKAGE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, file


def test_the_public_names_are_these() -> None:
    assert set(pgflow_otp.__all__) == {
        "Client", "ConfigurationError", "Context", "Cron", "DatabaseUnavailable", "Flow", "FlowDefinitionError",
        "FlowNotFound", "Job", "NonRetryable", "PayloadError", "PgflowError", "Run", "RunFailed", "RunNotFound",
        "SchemaError", "Settings", "StepState", "Supervisor", "TargetError", "TreeStartError", "job",
    }  # fmt: skip
    for name in pgflow_otp.__all__:
        assert getattr(pgflow_otp, name).__doc__, name
