"""The child list: the one page that shows the architecture.

Order is start order; the tree stops in reverse. The root is rest_for_one: whoever dies takes those after it along.

    workers    dynamic; drained while the processes before them still run
    recovery   releases the tasks of dead workers; stopped before the workers drain, so a drain is never swept
    starter    transient: runs again, and finds everything registered, whenever something before it was restarted
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgflow_otp.otp.child_spec import ChildSpec, Flags, SupervisorSpec
from pgflow_otp.runtime.recovery import run_recovery
from pgflow_otp.runtime.starter import StarterConfig, run_starter
from pgflow_otp.runtime.worker import WorkerConfig, run_worker

if TYPE_CHECKING:
    from pgflow_otp.otp.hooks import Path
    from pgflow_otp.runtime.boot import BootConfig

WORKERS: Path = ("workers",)
STARTER: Path = ("starter",)
ROOT_FLAGS = Flags(strategy="rest_for_one", intensity=3, period=5)
#: Seconds beyond drain and kill grace that a worker gets to record what it was doing.
DRAIN_MARGIN = 6.0
#: Seconds of its own running time after which a worker that does not answer is taken for wedged.
WEDGED_AFTER = 60.0


def tree_spec(config: BootConfig) -> SupervisorSpec:
    """Return the specification of the whole tree."""
    return SupervisorSpec(
        flags=ROOT_FLAGS,
        children=[
            ChildSpec(
                id=WORKERS[-1],
                type="supervisor",
                start=SupervisorSpec(flags=Flags(intensity=10, period=60), dynamic=True),
            ),
            ChildSpec(id="recovery", start=run_recovery, args=(config.dsn, config.settings), shutdown=5000),
            _starter_spec(STARTER[-1], config.targets, config),
        ],
    )


def added_starter_spec(target: str, config: BootConfig) -> ChildSpec:
    """Return the specification of the starter of a target that came later: it stays as the root's last child, so that
    the target is brought up again whenever the others are."""
    return _starter_spec(f"starter:{target}", (target,), config)


def _starter_spec(key: str, targets: tuple[str, ...], config: BootConfig) -> ChildSpec:
    starter = StarterConfig(targets, config.source, config.dsn, config.settings)
    return ChildSpec(id=key, start=run_starter, args=(starter,), restart="transient", shutdown=2000)


def worker_spec(slug: str, target: str, config: BootConfig) -> ChildSpec:
    """Return the specification of one flow's worker, a child of `workers`."""
    settings = config.settings
    return ChildSpec(
        id=f"worker:{slug}",
        start=run_worker,
        args=(WorkerConfig(slug, target, config.source, config.dsn, settings),),
        restart="transient",
        shutdown=int((settings.drain_timeout + settings.kill_grace + DRAIN_MARGIN) * 1000),
        watchdog=WEDGED_AFTER,
        # It hands its tasks back when the root dies, instead of dying with it; its lifeline tells.
        dies_with_parent=False,
    )
