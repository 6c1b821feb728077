"""Finding flows by name: `module` or `module:attribute`.

Runs user code, so only a throw-away process, the forkserver, or the process that calls the client may load a target.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import TYPE_CHECKING

from pgflow_otp.errors import FlowDefinitionError, TargetError
from pgflow_otp.flow.definition import names
from pgflow_otp.flow.dsl import Flow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def parse_target(target: str) -> tuple[str, str | None]:
    """Split a target into module and attribute.

    Raises:
        TargetError: it is neither `module` nor `module:attribute`.
    """
    module, colon, attribute = target.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise TargetError(f"'{target}' is a file name; write the module's name: {dotted}{colon}{attribute}")
    if not all(part.isidentifier() for part in module.split(".")) or (colon and not attribute.isidentifier()):
        raise TargetError(f"'{target}' is not a flow target; write module or module:attribute")
    return module, attribute or None


def load_target(target: str, search_path: Sequence[str]) -> dict[str, Flow]:
    """Import a target and return its flows by attribute name, in order of definition.

    Args:
        target: `module` (all flows in it) or `module:attribute`.
        search_path: replaces `sys.path` for the import and afterwards.

    Raises:
        TargetError: it cannot be imported or holds no flow. One line that says why.
        FlowDefinitionError: a flow in it is declared wrongly.
    """
    module_name, attribute = parse_target(target)
    sys.path[:] = list(search_path)
    importlib.invalidate_caches()
    module = _import(module_name, search_path)
    found: dict[str, Flow] = {}
    for name, value in vars(module).items():
        if isinstance(value, Flow) and not any(value is known for known in found.values()):
            found[name] = value
    if attribute is not None:
        if attribute in found:
            return {attribute: found[attribute]}
        value = getattr(module, attribute, None)
        if isinstance(value, Flow):
            return {attribute: value}
        if hasattr(module, attribute):
            raise TargetError(f"{target} is a {type(value).__name__}, not a Flow or Job")
        raise TargetError(f"module {module_name} has no attribute '{attribute}'; flows in it: {names(list(found))}")
    if not found:
        raise TargetError(f"module {module_name} holds no Flow or Job")
    slugs: dict[str, str] = {}
    for name, flow in found.items():
        other = slugs.setdefault(flow.slug.lower(), name)
        if other != name:
            raise FlowDefinitionError(f"module {module_name}: '{other}' and '{name}' both have the slug '{flow.slug}'")
    return found


def _import(module_name: str, search_path: Sequence[str]) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except FlowDefinitionError as error:
        raise FlowDefinitionError(f"{error} ({_place(error)})") from None
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            where = search_path[0] if search_path else "."
            raise TargetError(f"there is no module '{error.name}' (looked in {where} and the installed ones)") from None
        raise TargetError(f"importing {module_name} failed: {_one_line(error)} ({_place(error)})") from None
    except SyntaxError as error:
        raise TargetError(
            f"importing {module_name} failed: {error.msg} ({error.filename}, line {error.lineno})"
        ) from None
    except SystemExit as error:
        raise TargetError(f"importing {module_name} ended the process with sys.exit({error.code!r})") from None
    except Exception as error:
        raise TargetError(f"importing {module_name} failed: {_one_line(error)} ({_place(error)})") from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException) -> str:
    """Return file and line of the user's own code that led to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and "/pgflow_otp/" not in f.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else "place unknown"
