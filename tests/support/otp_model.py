"""An independent model of OTP, and random scripts to drive it and the real thing with.

Written the slow and obvious way, over plain lists and without generators, from the numbered statements alone. It shares
no code with the core. A world decides what each start comes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

STRATEGIES = ("one_for_one", "one_for_all", "rest_for_one")
PERIOD = 5.0

#: (what, child, reason, outcomes of the starts that follow, seconds that have gone by)
Event = tuple[str, str, str, list[str], float]

outcomes = st.sampled_from(["ok", "ok", "fail", "ignore"])
events = st.tuples(
    st.sampled_from(["exit", "exit", "exit", "terminate", "restart", "delete", "start", "retry", "retry", "retry"]),
    st.sampled_from("abcdx"),
    st.sampled_from(["crash", "crash", "normal"]),
    st.lists(outcomes, max_size=4),
    st.sampled_from([0.0, 1.0, 2.5, 5.0, 6.0]),
)


@st.composite
def restarts_that_fail(draw: st.DrawFn) -> list[Event]:
    """A crash, a restart that fails, something done to the same child, and the retry: rare among random events."""
    name = draw(st.sampled_from("abcd"))
    what = draw(st.sampled_from(["terminate", "restart", "delete", "start", "exit"]))
    return [
        ("exit", name, "crash", draw(st.sampled_from([["fail"], ["ok", "fail"], ["fail", "fail"]])), 6.0),
        (what, draw(st.sampled_from([name, "a", "d"])), "crash", draw(st.lists(outcomes, max_size=2)), 0.0),
        ("retry", name, "crash", draw(st.lists(outcomes, max_size=4)), 0.0),
    ]


scripts = st.lists(st.one_of(events.map(lambda event: [event]), restarts_that_fail()), max_size=12).map(
    lambda parts: [event for part in parts for event in part]
)
kinds = st.lists(st.sampled_from(["permanent", "transient", "temporary"]), min_size=1, max_size=4)


@dataclass
class World:
    """What happens outside: the time, and what becomes of a start. "ok" when nothing else was decided."""

    now: float = 0.0
    outcomes: list[str] = field(default_factory=list)

    def next(self) -> str:
        return self.outcomes.pop(0) if self.outcomes else "ok"


@dataclass
class Kid:
    name: str
    restart: str
    state: str = "undefined"


class Model:
    """OTP, from the statements."""

    def __init__(self, strategy: str, intensity: int, kinds: list[str], world: World) -> None:
        self.strategy, self.intensity, self.world = strategy, intensity, world
        self.kids = [Kid(name, kind) for name, kind in zip("abcd", kinds, strict=False)]
        self.restarts: list[float] = []
        self.retries: list[str] = []
        self.trace: list[str] = []
        self.over = False
        for kid in list(self.kids):
            self.start(kid)

    def get(self, name: str) -> Kid | None:
        return next((k for k in self.kids if k.name == name), None)

    def start(self, kid: Kid) -> bool:
        self.trace.append(f"start {kid.name}")
        outcome = self.world.next()
        kid.state = "running" if outcome == "ok" else "undefined"
        if outcome == "ignore" and kid.restart == "temporary":
            self.kids.remove(kid)  # 20
        return outcome != "fail"

    def stop(self, kid: Kid) -> None:
        if kid.state == "running":
            self.trace.append(f"stop {kid.name}")
        kid.state = "undefined"
        if kid.restart == "temporary":
            self.kids.remove(kid)  # 36, 100

    def exit(self, kid: Kid, reason: str) -> None:
        if kid.state != "running":
            return
        kid.state = "undefined"
        if kid.restart == "temporary":
            self.kids.remove(kid)  # 35
            if reason == "crash":
                self.trace.append(f"child_terminated {kid.name}")
        elif kid.restart == "permanent" or reason == "crash":  # 33, 34
            self.trace.append(f"child_terminated {kid.name}")
            self.bring_back(kid)

    def bring_back(self, kid: Kid) -> None:
        now = self.world.now
        self.restarts = [t for t in [*self.restarts, now] if t >= now - PERIOD]  # 59
        if len(self.restarts) > self.intensity:  # 58, 65
            self.trace.append(f"shutdown {kid.name}")
            kid.state = "undefined"
            for other in reversed(list(self.kids)):
                self.stop(other)
            self.trace.append("exit")
            self.over = True
            return
        where = self.kids.index(kid)
        affected = {"one_for_one": [kid], "one_for_all": list(self.kids), "rest_for_one": self.kids[where:]}
        kid.state = "undefined"
        for other in reversed(affected[self.strategy]):  # 46 to 48
            if other is not kid:
                self.stop(other)
        for other in affected[self.strategy]:
            if other in self.kids and not self.start(other):
                self.trace.append(f"start_error {other.name}")
                other.state = "restarting"  # 70, 77
                self.retries.append(other.name)
                return

    def call(self, what: str, name: str) -> None:
        kid = self.get(name)
        if what == "start":
            if kid is not None:  # 98
                self.answer("already_started" if kid.state == "running" else "already_present")
                return
            kid = Kid(name, "permanent")
            self.kids.append(kid)
            if self.start(kid):
                self.answer("ok")
            else:  # 99
                self.kids.remove(kid)
                self.answer("failed")
        elif kid is None:
            self.answer("not_found")
        elif what == "terminate":  # 100
            self.stop(kid)
            self.answer("ok")
        elif kid.state != "undefined":  # 101, 102
            self.answer(kid.state)
        elif what == "delete":
            self.kids.remove(kid)
            self.answer("ok")
        else:
            self.answer("ok" if self.start(kid) else "failed")

    def answer(self, text: str) -> None:
        self.trace.append(f"answer {text}")

    def retry(self) -> None:
        if self.retries:
            kid = self.get(self.retries.pop(0))
            if kid is not None and kid.state == "restarting":  # 72
                self.bring_back(kid)
