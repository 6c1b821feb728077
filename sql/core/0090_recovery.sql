-- Tasks whose worker never came back with an answer.

-- Requeue what is overdue by more than p_buffer seconds; after the third time stamp it and archive its message.
-- Rows are taken with SKIP LOCKED, so this waits for nobody. Messages are touched after the tasks, for every queue,
-- whether or not anything was requeued.
create function pgflow_otp._requeue_stalled(p_buffer double precision, out requeued int, out made_visible bigint)
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

create function pgflow.requeue_stalled_tasks() returns int
language sql volatile security definer set search_path to '' as $$
  select s.requeued from pgflow_otp._requeue_stalled(30) s
$$;

create function pgflow.track_worker_function(function_name text, start_mode text default 'http') returns void
language sql volatile as $$
  insert into pgflow.worker_functions as w (function_name, start_mode)
  values (track_worker_function.function_name, track_worker_function.start_mode)
  on conflict on constraint worker_functions_pkey
  do update set start_mode = excluded.start_mode, updated_at = clock_timestamp()
$$;

create function pgflow.mark_worker_stopped(worker_id uuid) returns void
language sql volatile as $$
  update pgflow.workers w set stopped_at = clock_timestamp() where w.worker_id = mark_worker_stopped.worker_id
$$;
