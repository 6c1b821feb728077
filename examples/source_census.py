"""A census of the Python standard library: every module parsed in a handler process of its own.

    pgflow-otp run examples.source_census
    pgflow-otp run examples.source_census --input '{"package": "asyncio"}'

CPU-heavy on purpose: the map uses as many processes as --max-concurrency allows.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pgflow_otp import Flow

census = Flow("source_census", max_attempts=3, base_delay=1, timeout=60)

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.Assert,
    ast.BoolOp,
    ast.comprehension,
    ast.match_case,
)


@census.step()
def discover(request: Any) -> list[str]:
    """List the modules: all of them, or those of one package."""
    package = (request or {}).get("package", "")
    found = []
    for path in sorted(_LIBRARY.rglob("*.py")):
        relative = path.relative_to(_LIBRARY)
        inside = not package or relative.parts[0] in (package, f"{package}.py")
        if inside and not _LEFT_OUT.intersection(relative.parts):
            found.append(str(relative))
    return found


@census.map(array=discover)
def measure(relative: str) -> dict[str, Any]:
    """Parse one module and count what is in it."""
    source = (_LIBRARY / relative).read_bytes()
    tree = ast.parse(source, relative)
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    longest = max(functions, key=_length, default=None)
    return {
        "module": relative,
        "lines": source.count(b"\n"),
        "functions": len(functions),
        "classes": sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree)),
        "complexity": sum(_complexity(function) for function in functions),
        "longest_function": {"name": longest.name, "lines": _length(longest)} if longest else None,
    }


@census.step(depends_on=[measure])
def rank(results: dict[str, Any]) -> dict[str, Any]:
    """Reduce the measurements to a report."""
    modules: list[dict[str, Any]] = results["measure"]
    with_functions = [m for m in modules if m["longest_function"]]
    return {
        "modules": len(modules),
        "lines": sum(m["lines"] for m in modules),
        "functions": sum(m["functions"] for m in modules),
        "classes": sum(m["classes"] for m in modules),
        "largest": _top(modules, "lines"),
        "most_complex": _top(modules, "complexity"),
        "longest_functions": [
            {"module": m["module"], **m["longest_function"]}
            for m in sorted(with_functions, key=lambda m: -m["longest_function"]["lines"])[:10]
        ],
    }


def _top(modules: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [{"module": m["module"], key: m[key]} for m in sorted(modules, key=lambda m: -m[key])[:10]]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _complexity(function: ast.AST) -> int:
    """McCabe's number: one, and one for every branch. Nested functions count for themselves."""
    return 1 + sum(isinstance(node, _BRANCHES) for node in _own_nodes(function))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _own_nodes(child)
