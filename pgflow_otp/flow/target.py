"""Finding flows: by name, `module` or `module:attribute`, or as an object that came along.

Runs user code, so only a throw-away process, the forkserver, or the process that calls the client may load a target.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pgflow_otp.errors import FlowDefinitionError, TargetError
from pgflow_otp.flow.definition import names
from pgflow_otp.flow.dsl import Flow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Source:
    """Where flows are found.

    Attributes:
        search_path: `sys.path` for the user's modules.
        objects: flows that no module can be asked for, pickled by `as_object`, by the target that stands for them.
    """

    search_path: tuple[str, ...]
    objects: Mapping[str, bytes] = field(default_factory=dict)

    def with_objects(self, objects: Mapping[str, bytes]) -> Source:
        """Return a source that holds these too."""
        return replace(self, objects={**self.objects, **objects})


def target_of(flow: Flow) -> tuple[str, bytes | None]:
    """Return a target for a flow object: its name where a module holds it, else a name made up and the object itself.

    Raises:
        FlowDefinitionError: it holds something that another process cannot be given.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name in ("__main__", "__mp_main__") or getattr(module, "__spec__", None) is None:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is flow and name.isidentifier():
                return f"{module_name}:{name}", None
    return f"<{flow.slug}>", _pickled(flow)


def _pickled(flow: Flow) -> bytes:
    import dill  # only here and where it is read again: most flows are named

    try:
        # recurse: the globals that are used, instead of all that the defining module happens to hold.
        data: bytes = dill.dumps(flow, recurse=True)
    except Exception as error:
        raise FlowDefinitionError(
            f"flow '{flow.slug}' cannot be given to another process as an object ({_one_line(error)}); "
            "put it into a module and give its name, or let its handlers open what they need themselves"
        ) from None
    return data


def module_of(target: str) -> str:
    """Return the part of a target that is imported. For an object it is the target itself."""
    return target if target.startswith("<") else parse_target(target)[0]


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


def load_target(target: str, source: Source) -> dict[str, Flow]:
    """Import a target and return its flows by target, in order of definition.

    Args:
        target: `module` (all flows in it), `module:attribute`, or what stands for an object.
        source: its search_path replaces `sys.path` for the import and afterwards.

    Raises:
        TargetError: it cannot be imported or holds no flow. One line that says why.
        FlowDefinitionError: a flow in it is declared wrongly.
    """
    sys.path[:] = list(source.search_path)
    importlib.invalidate_caches()
    if target in source.objects:
        return {target: _unpickled(target, source.objects[target])}
    module_name, attribute = parse_target(target)
    module = _import(module_name, source.search_path)
    found: dict[str, Flow] = {}
    for name, value in vars(module).items():
        if isinstance(value, Flow) and not any(value is known for known in found.values()):
            found[name] = value
    if attribute is not None:
        if attribute in found:
            return {target: found[attribute]}
        value = getattr(module, attribute, None)
        if isinstance(value, Flow):
            return {target: value}
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
    return {f"{module_name}:{name}": flow for name, flow in found.items()}


def _unpickled(target: str, data: bytes) -> Flow:
    """Read a flow that the program which started the tree has given it."""
    import dill

    try:
        flow: Any = dill.loads(data)
    except Exception as error:
        raise TargetError(f"flow {target} could not be taken over: {_one_line(error)} ({_place(error)})") from None
    assert isinstance(flow, Flow)
    return flow


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
