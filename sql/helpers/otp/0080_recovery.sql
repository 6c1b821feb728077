-- Tasks whose worker never came back with an answer.

-- Requeue what is overdue by more than p_buffer seconds; after the third time stamp it and archive its message.
-- Rows are taken with SKIP LOCKED, so this waits for nobody. Messages are touched after the tasks, for every queue,
-- whether or not anything was requeued.
create or replace function pgflow_otp.requeue_stalled(p_buffer double precision, out requeued int, out made_visible bigint)
language plpgsql volatile set search_path to '' as $$
declare
  v_archived bigint;
begin
  with stalled as materialized (
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    join pgflow.steps st on st.flow_slug = t.flow_slug and st.step_slug = t.step_slug
    join pgflow.flows f on f.flow_slug = t.flow_slug
    where t.status = 'started'
      and t.permanently_stalled_at is null
      and r.status = 'started'
      and ss.status = 'started'
      and t.started_at < now() - make_interval(secs => coalesce(st.opt_timeout, f.opt_timeout) + p_buffer)
    order by t.run_id, t.step_slug, t.task_index
    for update of t skip locked
  ), again as (
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        requeued_count = t.requeued_count + 1, last_requeued_at = now()
    from stalled s
    where s.requeued_count < 3
      and t.run_id = s.run_id and t.step_slug = s.step_slug and t.task_index = s.task_index
    returning t.queue_name, t.message_id
  ), given_up as (
    update pgflow.step_tasks t
    set permanently_stalled_at = now()
    from stalled s
    where s.requeued_count >= 3
      and t.run_id = s.run_id and t.step_slug = s.step_slug and t.task_index = s.task_index
    returning t.queue_name, t.message_id
  ), visible as (
    select v.msg_id
    from (
      select a.queue_name, array_agg(a.message_id) as ids
      from again a where a.message_id is not null group by a.queue_name
    ) q
    cross join lateral pgflow.set_vt_batch(q.queue_name, q.ids, array_fill(0, array[cardinality(q.ids)])) v
  ), archived as (
    select a.msg_id
    from (
      select g.queue_name, array_agg(g.message_id) as ids
      from given_up g where g.message_id is not null group by g.queue_name
    ) q
    cross join lateral pgmq.archive(q.queue_name, q.ids) as a(msg_id)
  )
  select
    (select count(*) from again), (select count(*) from visible), (select count(*) from archived)
  into requeued, made_visible, v_archived;
end
$$;

-- Fail the tasks that recovery gave up on, as their step's when_exhausted says. Runs in a transaction of its own:
-- recovery locks tasks first, failing locks the run first.
create or replace function pgflow_otp.escalate_stalled() returns int
language plpgsql volatile set search_path to '' as $$
declare
  v_task record;
  v_escalated int := 0;
begin
  for v_task in
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    where t.status = 'started'
      and t.permanently_stalled_at is not null
      and r.status = 'started'
      and ss.status = 'started'
    order by t.run_id, t.step_slug, t.task_index
  loop
    if pgflow_otp._fail_for_good(
      v_task.run_id, v_task.step_slug, v_task.task_index,
      format('Task stalled: no answer from its worker, requeued %s times', v_task.requeued_count)) = 'failed'
    then
      v_escalated := v_escalated + 1;
    end if;
  end loop;
  return v_escalated;
end
$$;
