"""Flows nobody thought of: whichever functions drive them, in one order of outcomes, they end in the same state."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import invariants, reset

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine

POLICIES = ("fail", "skip", "skip-cascade")
OUTPUTS: tuple[Any, ...] = ([], [1], [1, 2, 3], {"k": 1}, {"k": 2, "l": [1]}, 7, "text", False, None)
PATTERNS: tuple[Any, ...] = ({"k": 1}, {}, {"a": {"k": 1}}, {"b": [1]}, {"a": {}, "b": {}}, {"c": []})
#: How often a run is driven on before it has to have ended: each task, each attempt, and cascades in between.
ROUNDS = 200
#: The suite tries the same flows each time; with this variable so many others.
OTHERS = int(os.environ.get("PGFLOW_TEST_EXAMPLES", "0"))


@dataclass(frozen=True, slots=True)
class Step:
    """What add_step is told."""

    slug: str
    parents: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Story:
    """A flow, the inputs of its runs, and a seed for all that happens to them."""

    steps: tuple[Step, ...]
    inputs: tuple[Any, ...]
    seed: int


@st.composite
def stories(draw: st.DrawFn) -> Story:
    steps: list[Step] = []
    for slug in "abcdefg"[: draw(st.integers(1, 7))]:
        known = [step.slug for step in steps]
        is_map = draw(st.integers(0, 2)) == 0
        some = st.lists(st.sampled_from(known), unique=True, max_size=1 if is_map else 3) if known else st.just([])
        options: dict[str, Any] = {
            "step_type": "map" if is_map else "single",
            "max_attempts": draw(st.integers(1, 2)),
            "when_exhausted": draw(st.sampled_from(POLICIES)),
            "when_unmet": draw(st.sampled_from(POLICIES)),
        }
        for name in ("required_input_pattern", "forbidden_input_pattern"):
            if draw(st.integers(0, 4)) == 0:
                options[name] = draw(st.sampled_from(PATTERNS))
        steps.append(Step(slug, tuple(sorted(draw(some))), options))
    has_root_map = any(step.options["step_type"] == "map" and not step.parents for step in steps)
    inputs = [value for value in OUTPUTS if isinstance(value, list)] if has_root_map else OUTPUTS
    return Story(
        tuple(steps),
        tuple(draw(st.lists(st.sampled_from(inputs), min_size=1, max_size=3))),
        draw(st.integers(0, 1_000_000)),
    )


class Drive:
    """Runs of one flow, driven to their ends by one kind of functions."""

    def __init__(self, engine: Engine, story: Story, flow: str, outcomes: dict[str, int]) -> None:
        self.engine = engine
        self.story = story
        self.flow = flow
        self.outcomes = outcomes
        self.claimed: list[dict[str, Any]] = []
        engine.flow(flow)
        for step in story.steps:
            engine.step(step.slug, *step.parents, flow=flow, **step.options)
        self.worker = engine.worker(queue=flow)
        engine.events()
        self.runs = self.start()

    # What the kinds do differently

    def start(self) -> list[uuid.UUID]:
        return [self.engine.start(value, flow=self.flow) for value in self.story.inputs]

    def claim(self) -> list[dict[str, Any]]:
        return self.engine.claim(self.worker, self.flow)

    def settle(self, items: list[tuple[dict[str, Any], str, Any]]) -> None:
        for task, outcome, said in items:
            key = (task["run_id"], task["step_slug"], task["task_index"])
            if outcome == "completed":
                self.engine.complete(*key, said)
            else:
                self.engine.fail(*key, said)

    # What they have in common

    def step(self, chance: random.Random) -> None:
        """Claim all there is; settle some of it, in a random order."""
        self.claimed += self.claim()
        self.claimed.sort(key=lambda t: (self.runs.index(t["run_id"]), t["step_slug"], t["task_index"]))
        chance.shuffle(self.claimed)
        count = chance.randint(1, len(self.claimed)) if self.claimed else 0
        chosen, self.claimed = self.claimed[:count], self.claimed[count:]
        items: list[tuple[dict[str, Any], str, Any]] = []
        for task in chosen:
            (outcome,) = chance.choices(list(self.outcomes), list(self.outcomes.values()))
            output = chance.choice(OUTPUTS)
            items.append((task, outcome, output if outcome == "completed" else f"no luck with {task['step_slug']}"))
        self.settle(items)

    def is_over(self) -> bool:
        return not self.engine.rows("select from pgflow.runs where flow_slug = %s and status = 'started'", self.flow)

    def state(self) -> dict[str, Any]:
        """Everything about the runs but when it happened, their ids, and who did it."""
        order = {run: number for number, run in enumerate(self.runs)}

        def told(query: str) -> list[dict[str, Any]]:
            rows = self.engine.rows(query, self.flow)
            for row in rows:
                row["run_id"] = order[row["run_id"]]
                for column, value in row.items():
                    if column.endswith("_at") or column == "message_id":
                        row[column] = value is not None
                for column in ("flow_slug", "last_worker_id", "queue_name"):
                    row.pop(column, None)
            return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True, default=str))

        messages = (
            "select (m.message ->> 'run_id')::uuid as run_id, m.message - 'run_id' - 'flow_slug' as message, m.live "
            f"from (select message, true as live from pgmq.q_{self.flow} "
            f"union all select message, false from pgmq.a_{self.flow}) m where %s <> ''"
        )
        return {
            "runs": told("select * from pgflow.runs where flow_slug = %s"),
            "states": told("select * from pgflow.step_states where flow_slug = %s"),
            "tasks": told("select * from pgflow.step_tasks where flow_slug = %s"),
            "messages": told(messages),
        }

    def events(self) -> dict[int, list[tuple[str, dict[str, Any]]]]:
        """What was sent since the last look, by run, in order."""
        order = {str(run): number for number, run in enumerate(self.runs)}
        sent: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for event, payload in self.engine.payloads():
            run = order[payload.pop("run_id")]
            payload.pop("flow_slug", None)
            sent.setdefault(run, []).append(
                (event, {key: value is not None if key.endswith("_at") else value for key, value in payload.items()})
            )
        return sent


class DriveOneByOne(Drive):
    """By settle_task."""

    def claim(self) -> list[dict[str, Any]]:
        return self.engine.own_claim(self.worker, self.flow)

    def settle(self, items: list[tuple[dict[str, Any], str, Any]]) -> None:
        for item in items:
            self.engine.settle_one(self.worker, item)


class DriveMany(DriveOneByOne):
    """By start_flows, claim_tasks and settle_tasks."""

    def start(self) -> list[uuid.UUID]:
        inputs = [json.dumps(value) for value in self.story.inputs]
        rows = self.engine.rows("select pgflow_otp.start_flows(%s, %s, null) as run_id", self.flow, inputs)
        return [row["run_id"] for row in rows]

    def settle(self, items: list[tuple[dict[str, Any], str, Any]]) -> None:
        verdicts = self.engine.settle(self.worker, items)
        assert len(verdicts) == len(items)
        assert not {verdict["status"] for verdict in verdicts} & {"busy", "refused"}


@pytest.mark.parametrize(
    ("kind", "outcomes"),
    [
        (Drive, {"completed": 7, "failed": 3}),
        (DriveOneByOne, {"completed": 12, "failed": 3, "failed_for_good": 2, "released": 2, "crashed": 1}),
    ],
    ids=["the single functions", "one by one"],
)
@settings(
    max_examples=OTHERS or 60,
    deadline=None,
    database=None,
    derandomize=not OTHERS,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(story=stories())
def test_many_at_once_end_as_if_they_came_one_after_the_other(
    engine: Engine, kind: type[Drive], outcomes: dict[str, int], story: Story
) -> None:
    reset.empty(engine.connection)
    drives = [kind(engine, story, "x", outcomes)]
    told = [drives[0].events()]
    drives.append(DriveMany(engine, story, "y", outcomes))
    told.append(drives[1].events())
    chances = [random.Random(story.seed) for _ in drives]
    for _ in range(ROUNDS):
        assert told[0] == told[1]
        assert drives[0].state() == drives[1].state()
        invariants.check(engine)
        if drives[0].is_over():
            break
        for number, (drive, chance) in enumerate(zip(drives, chances, strict=True)):
            drive.step(chance)
            told[number] = drive.events()
    assert all(drive.is_over() for drive in drives)
