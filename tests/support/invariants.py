"""What holds of all stored runs whenever nobody is in the middle of something (sql-contract 1 and 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.engine import Engine

#: Each finds what breaks it.
INVARIANTS = {
    "a run that has not failed counts its steps without an end": """
        select r.run_id from pgflow.runs r join pgflow.step_states ss using (run_id)
        where r.status <> 'failed'
        group by r.run_id
        having r.remaining_steps <> count(*) filter (where ss.status in ('created', 'started'))""",
    "a run is completed when no step remains": """
        select run_id from pgflow.runs
        where (status = 'completed') <> (remaining_steps = 0) and status <> 'failed'""",
    "a started step of a run that goes on counts its tasks without an end": """
        select ss.run_id, ss.step_slug
        from pgflow.step_states ss
        join pgflow.runs r using (run_id)
        left join pgflow.step_tasks t using (run_id, step_slug)
        where ss.status = 'started' and r.status = 'started'
        group by ss.run_id, ss.step_slug
        having ss.remaining_tasks <> count(t) filter (where t.status in ('queued', 'started'))
          or ss.initial_tasks <> count(t) or ss.remaining_tasks = 0""",
    "only a step that was started has tasks": """
        select ss.run_id, ss.step_slug from pgflow.step_states ss join pgflow.step_tasks t using (run_id, step_slug)
        where ss.status = 'created' or (ss.status = 'completed' and t.status <> 'completed')""",
    "a step that waits counts the dependencies without an end": """
        select ss.run_id, ss.step_slug
        from pgflow.step_states ss
        join pgflow.runs r using (run_id)
        join pgflow.deps d on d.flow_slug = ss.flow_slug and d.step_slug = ss.step_slug
        join pgflow.step_states ds on ds.run_id = ss.run_id and ds.step_slug = d.dep_slug
        where ss.status = 'created' and r.status = 'started'
        group by ss.run_id, ss.step_slug
        having ss.remaining_deps <> count(*) filter (where ds.status in ('created', 'started'))""",
    "nothing that is ready waits in a run that goes on": """
        select ss.run_id, ss.step_slug from pgflow.step_states ss join pgflow.runs r using (run_id)
        where ss.status = 'created' and ss.remaining_deps = 0 and r.status = 'started'""",
    "a run that goes on has a task that can go on": """
        select r.run_id from pgflow.runs r
        where r.status = 'started' and not exists (
          select from pgflow.step_tasks t where t.run_id = r.run_id and t.status in ('queued', 'started'))""",
    "no task of a run or step with an end is without one": """
        select t.run_id, t.step_slug
        from pgflow.step_tasks t join pgflow.runs r using (run_id) join pgflow.step_states ss using (run_id, step_slug)
        where t.status in ('queued', 'started') and (r.status <> 'started' or ss.status <> 'started')""",
    "a completed map has the output of each task, in order": """
        select ss.run_id, ss.step_slug
        from pgflow.step_states ss
        join pgflow.steps st using (flow_slug, step_slug)
        where st.step_type = 'map' and ss.status = 'completed' and ss.output is distinct from coalesce((
          select jsonb_agg(coalesce(t.output, 'null') order by t.task_index)
          from pgflow.step_tasks t where t.run_id = ss.run_id and t.step_slug = ss.step_slug), '[]')""",
    "a completed run has the outputs of its completed leaves": """
        select r.run_id from pgflow.runs r
        where r.status = 'completed' and r.output is distinct from (
          select jsonb_object_agg(ss.step_slug, ss.output)
          from pgflow.step_states ss
          where ss.run_id = r.run_id and ss.status = 'completed' and not exists (
            select from pgflow.deps d where d.flow_slug = r.flow_slug and d.dep_slug = ss.step_slug))""",
    "no kept element belongs to a task with an end": """
        select m.run_id, m.step_slug, m.task_index
        from pgflow_otp.map_items m left join pgflow.step_tasks t using (run_id, step_slug, task_index)
        where t.status is null or t.status not in ('queued', 'started')""",
}
#: Of each queue: a task has a live message as long as it is open, and none afterwards.
MESSAGES = """
    select t.run_id, t.step_slug, t.task_index, t.status
    from pgflow.step_tasks t
    left join pgmq.{live} q on q.msg_id = t.message_id
    left join pgmq.{archived} a on a.msg_id = t.message_id
    where t.queue_name = %s
      and t.permanently_stalled_at is null
      and ((q.msg_id is null) <> (a.msg_id is not null)
        or (q.msg_id is not null) <> (t.status in ('queued', 'started')))
"""


def check(engine: Engine) -> None:
    """Fail with what breaks an invariant."""
    for claim, query in INVARIANTS.items():
        assert engine.rows(query) == [], claim
    for row in engine.rows("select queue_name from pgmq.list_queues()"):
        queue = row["queue_name"].lower()
        query = MESSAGES.format(live=f"q_{queue}", archived=f"a_{queue}")
        assert engine.rows(query, queue) == [], f"messages of {queue} match their tasks"
