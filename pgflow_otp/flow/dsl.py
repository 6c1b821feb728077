"""Declaring flows: `Flow`, its decorators `step`, `map` and `setup`, and `job`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from pgflow_otp.errors import FlowDefinitionError
from pgflow_otp.flow.cron import Cron
from pgflow_otp.flow.definition import (
    LONGEST_FLOW_SLUG,
    LONGEST_STEP_SLUG,
    UNSET,
    Options,
    StepDefinition,
    StepType,
    check_limit,
    check_mode,
    check_pattern,
    check_slug,
    names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Handler = TypeVar("Handler", bound="Callable[..., Any]")


class Flow:
    """A workflow: named steps, each a function, and what each waits for.

    Args:
        slug: name of the flow, unique in a database ignoring case; letters, digits and single underscores, at most 47
            characters.
        max_attempts: how often a task may be tried in all; 1 or more. None: not stated, the database's default (3).
        base_delay: seconds; the n-th retry waits `base_delay * 2**n`. None: not stated (5).
        timeout: seconds a handler may take. None: not stated (60).
        cron: a schedule (string or `Cron`) on which the flow starts by itself.

    Raises:
        FlowDefinitionError: a value is not valid. Names the flow and the value.
    """

    flow_type = "flow"

    def __init__(
        self,
        slug: str,
        *,
        max_attempts: int | None = None,
        base_delay: int | None = None,
        timeout: int | None = None,
        cron: str | Cron | None = None,
    ) -> None:
        kind = self.flow_type
        self.slug = check_slug(kind, slug, LONGEST_FLOW_SLUG)
        self.options = Options(max_attempts=max_attempts, base_delay=base_delay, timeout=timeout)
        self.options.check(f"{kind} '{slug}'")
        self.cron = _cron(f"{kind} '{slug}'", cron)
        self.steps: dict[str, StepDefinition] = {}
        self.setup_function: Callable[[], Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.slug}: {len(self.steps)} steps>"

    def step(
        self,
        slug: str | None = None,
        *,
        depends_on: Sequence[str | Callable[..., Any]] = (),
        max_attempts: int | None = None,
        base_delay: int | None = None,
        timeout: int | None = None,
        start_delay: int | None = None,
        if_: Any = UNSET,
        if_not: Any = UNSET,
        when_unmet: str | None = None,
        when_exhausted: str | None = None,
        memory_mb: int | None = None,
        cpu_seconds: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Declare a step; decorates its function, which is returned unchanged.

        A root step gets the run's input as its first argument, any other a dict of the outputs it depends on. A second
        argument, if the function has one, is the `Context`. Async functions are fine.

        Args:
            slug: name of the step; the function's name when left out.
            depends_on: steps declared before, by slug or function; all must be done before this one starts.
            max_attempts: as for the flow; None: the flow's.
            base_delay: as for the flow; None: the flow's.
            timeout: as for the flow; None: the flow's.
            start_delay: seconds between the step's readiness and its first attempt; 0 when left out.
            if_: a JSON object that the step's input must contain (`@>`), else `when_unmet` decides.
            if_not: a JSON object that it must not contain.
            when_unmet: "fail", "skip" (default; dependents run without its output) or "skip-cascade".
            when_exhausted: the same for a step whose last attempt failed; default "fail".
            memory_mb: MiB of private memory (heap, arrays; not code) its handler process may have while it runs the
                task, what the imported modules hold included. Beyond it, allocations fail.
            cpu_seconds: seconds of CPU time the task may use.

        Raises:
            FlowDefinitionError: a value is not valid. Names the flow, the step and the value.
        """

        def declare(handler: Handler) -> Handler:
            own = self._slug_of(slug, handler)
            where = f"{self.flow_type} '{self.slug}', step '{own}'"
            self._add(
                where,
                own,
                "single",
                self._dependencies(where, own, depends_on),
                handler,
                Options(max_attempts, base_delay, timeout, start_delay),
                (if_, if_not, when_unmet, when_exhausted),
                (memory_mb, cpu_seconds),
            )
            return handler

        return declare

    def map(
        self,
        slug: str | None = None,
        *,
        array: str | Callable[..., Any] | None = None,
        max_attempts: int | None = None,
        base_delay: int | None = None,
        timeout: int | None = None,
        start_delay: int | None = None,
        if_: Any = UNSET,
        if_not: Any = UNSET,
        when_unmet: str | None = None,
        when_exhausted: str | None = None,
        memory_mb: int | None = None,
        cpu_seconds: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Declare a step with one task for every item of an array; its output is the array of their outputs.

        Args:
            slug: name of the step; the function's name when left out.
            array: the step, by slug or function, whose output is the array. None: the run's input is.

        The other arguments and errors are those of `step`.
        """

        def declare(handler: Handler) -> Handler:
            own = self._slug_of(slug, handler)
            where = f"{self.flow_type} '{self.slug}', map '{own}'"
            if isinstance(array, list | tuple | set):
                raise FlowDefinitionError(f"{where}: array is {array!r}; a map takes its items from one step only")
            self._add(
                where,
                own,
                "map",
                self._dependencies(where, own, () if array is None else (array,)),
                handler,
                Options(max_attempts, base_delay, timeout, start_delay),
                (if_, if_not, when_unmet, when_exhausted),
                (memory_mb, cpu_seconds),
            )
            return handler

        return declare

    def setup(self, function: Handler) -> Handler:
        """Run a function without arguments once in every new handler process, before its first task.

        Raises:
            FlowDefinitionError: the flow has such a function already, or this one takes arguments.
        """
        where = f"{self.flow_type} '{self.slug}'"
        if self.setup_function is not None:
            raise FlowDefinitionError(f"{where}: setup is declared twice")
        if _arity(where, function)[0] > 0:
            raise FlowDefinitionError(f"{where}: the setup function may not need arguments")
        self.setup_function = function
        return function

    def _slug_of(self, slug: Any, handler: Any) -> str:
        if callable(slug):
            raise FlowDefinitionError(
                f"{self.flow_type} '{self.slug}': write @{self.slug}.step() with parentheses, even without arguments"
            )
        return slug if slug is not None else getattr(handler, "__name__", repr(handler))

    def _add(
        self,
        where: str,
        slug: str,
        step_type: StepType,
        depends_on: tuple[str, ...],
        handler: Callable[..., Any],
        options: Options,
        condition: tuple[Any, Any, str | None, str | None],
        limits: tuple[int | None, int | None],
    ) -> None:
        check_slug(where, slug, LONGEST_STEP_SLUG)
        for known in self.steps:
            if known == slug:
                raise FlowDefinitionError(f"{where} is declared twice")
            if known.lower() == slug.lower():
                raise FlowDefinitionError(f"{where} differs from step '{known}' only in case")
        if slug in depends_on:
            raise FlowDefinitionError(f"{where} depends on itself")
        if not callable(handler):
            raise FlowDefinitionError(f"{where}: {handler!r} is not a function")
        needed, possible = _arity(where, handler)
        if needed > 2 or possible < 1:
            raise FlowDefinitionError(
                f"{where}: the function takes {needed if needed > 2 else possible} arguments; "
                "it has to take the input, and may take the context as a second"
            )
        options.check(where)
        if_, if_not, when_unmet, when_exhausted = condition
        if when_unmet is not None and if_ is UNSET and if_not is UNSET:
            raise FlowDefinitionError(f"{where}: when_unmet is given, but neither if_ nor if_not")
        self.steps[slug] = StepDefinition(
            slug=slug,
            step_type=step_type,
            depends_on=depends_on,
            handler=handler,
            takes_context=possible > 1,
            options=options,
            required_pattern=check_pattern(where, "if_", if_),
            forbidden_pattern=check_pattern(where, "if_not", if_not),
            when_unmet=check_mode(where, "when_unmet", when_unmet, "skip"),
            when_exhausted=check_mode(where, "when_exhausted", when_exhausted, "fail"),
            memory_mb=check_limit(where, "memory_mb", limits[0]),
            cpu_seconds=check_limit(where, "cpu_seconds", limits[1]),
        )

    def _dependencies(self, where: str, own: str, given: Any) -> tuple[str, ...]:
        if isinstance(given, str) or not hasattr(given, "__iter__"):
            raise FlowDefinitionError(f"{where}: depends_on is {given!r}; it has to be a list of steps")
        slugs: list[str] = []
        for item in given:
            slug = self._dependency(where, own, item)
            if slug in slugs:
                raise FlowDefinitionError(f"{where} names the dependency '{slug}' twice")
            slugs.append(slug)
        return tuple(slugs)

    def _dependency(self, where: str, own: str, item: Any) -> str:
        if isinstance(item, str):
            if item in self.steps or item == own:
                return item
            raise FlowDefinitionError(
                f"{where} depends on '{item}', which is not declared before it; steps so far: {names(list(self.steps))}"
            )
        for step in self.steps.values():
            if step.handler is item:
                return step.slug
        shown = getattr(item, "__name__", repr(item))
        raise FlowDefinitionError(
            f"{where} depends on {shown}, which is no step of this flow declared before it; "
            f"steps so far: {names(list(self.steps))}"
        )


class Job(Flow):
    """A flow of one step, made by `@job`. Calling it calls the function."""

    flow_type = "job"

    @property
    def function(self) -> Callable[..., Any]:
        return next(iter(self.steps.values())).handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def job(
    slug: str | None = None,
    *,
    max_attempts: int | None = None,
    base_delay: int | None = None,
    timeout: int | None = None,
    cron: str | Cron | None = None,
) -> Callable[[Callable[..., Any]], Job]:
    """Declare a job: a flow of one step that has the job's own name.

    The arguments and errors are those of `Flow`; the slug defaults to the function's name.
    """
    if callable(slug):
        raise FlowDefinitionError("write @job() with parentheses, even without arguments")

    def declare(function: Callable[..., Any]) -> Job:
        own = slug if slug is not None else function.__name__
        declared = Job(own, max_attempts=max_attempts, base_delay=base_delay, timeout=timeout, cron=cron)
        declared.step(own)(function)
        return declared

    return declare


def _cron(where: str, cron: Any) -> Cron | None:
    if cron is None or isinstance(cron, Cron):
        return cron
    try:
        return Cron(cron)
    except FlowDefinitionError as error:
        raise FlowDefinitionError(f"{where}: {error}") from None


def _arity(where: str, function: Callable[..., Any]) -> tuple[int, int]:
    """Return how many positional arguments a function needs, and how many of ours it can take.

    A second argument with a default counts only under the name ctx or context: `def fetch(url, retries=3)` is called
    with the input alone.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1, 1  # A builtin that does not tell its signature is called with the input alone.
    needed = possible = 0
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            optional = parameter.default is not parameter.empty
            if not (possible == 1 and optional and parameter.name not in ("ctx", "context")):
                possible += 1
            needed += not optional
        elif parameter.kind is parameter.VAR_POSITIONAL:
            possible += 2
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise FlowDefinitionError(
                f"{where}: the function needs the keyword argument '{parameter.name}', which nobody passes"
            )
    return needed, possible
