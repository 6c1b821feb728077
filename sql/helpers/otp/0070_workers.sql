-- Workers: their heartbeat, and what becomes of their tasks when they die.

-- Repeating it only refreshes the heartbeat: a worker that was stopped or deprecated stays so.
create or replace function pgflow_otp.register_worker(p_worker_id uuid, p_queue_name text, p_function_name text)
returns void
language sql volatile set search_path to '' as $$
  insert into pgflow.workers (worker_id, queue_name, function_name, started_at, last_heartbeat_at)
  values (p_worker_id, p_queue_name, p_function_name, now(), now())
  on conflict on constraint workers_pkey do update set last_heartbeat_at = now()
$$;

-- Hand back what a dead worker had claimed, at no cost of an attempt. A task that was running when its worker died
-- for the third time is left for fail_crashed_tasks. Rows that somebody else holds are skipped and counted in
-- remaining: call again until it is 0.
create or replace function pgflow_otp.release_worker(p_worker_id uuid, out released int, out crashed int, out remaining int)
language plpgsql volatile set search_path to '' as $$
declare
  v_visible bigint;
begin
  perform from pgflow.workers w where w.worker_id = p_worker_id for update;
  update pgflow.workers w set stopped_at = clock_timestamp()
  where w.worker_id = p_worker_id and w.stopped_at is null;

  with held as materialized (
    select t.run_id, t.step_slug, t.task_index
    from pgflow.step_tasks t
    where t.last_worker_id = p_worker_id and t.status = 'started' and t.requeued_count < 2
      and t.permanently_stalled_at is null
    order by t.run_id, t.step_slug, t.task_index
    for update skip locked
  ), again as (
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        attempts_count = greatest(t.attempts_count - 1, 0),
        requeued_count = t.requeued_count + 1, last_requeued_at = now()
    from held h
    where t.run_id = h.run_id and t.step_slug = h.step_slug and t.task_index = h.task_index
    returning t.queue_name, t.message_id, pgflow_otp._seconds_until(t.queued_at) as due
  ), visible as (
    select v.msg_id
    from (
      select a.queue_name, array_agg(a.message_id) as ids, array_agg(a.due) as due
      from again a where a.message_id is not null group by a.queue_name
    ) q
    cross join lateral pgflow.set_vt_batch(q.queue_name, q.ids, q.due) v
  )
  select (select count(*) from again), (select count(*) from visible) into released, v_visible;

  select
    count(*) filter (where t.requeued_count >= 2), count(*) filter (where t.requeued_count < 2)
  into crashed, remaining
  from pgflow.step_tasks t
  where t.last_worker_id = p_worker_id and t.status = 'started' and t.permanently_stalled_at is null;
end
$$;

create or replace function pgflow_otp.fail_crashed_tasks(p_worker_id uuid) returns int
language plpgsql volatile set search_path to '' as $$
declare
  v_task record;
  v_failed int := 0;
begin
  for v_task in
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    where t.last_worker_id = p_worker_id and t.status = 'started' and t.requeued_count >= 2
    order by t.run_id, t.step_slug, t.task_index
  loop
    if pgflow_otp._fail_for_good(
      v_task.run_id, v_task.step_slug, v_task.task_index,
      format('The worker process died while this task ran, for the %s. time that the task was lost or stalled',
        v_task.requeued_count + 1)) = 'failed'
    then
      v_failed := v_failed + 1;
    end if;
  end loop;
  return v_failed;
end
$$;

-- True while the worker may go on; false when it was told to leave or its row is gone.
create or replace function pgflow_otp.heartbeat(p_worker_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_alive boolean;
begin
  update pgflow.workers w
  set last_heartbeat_at = clock_timestamp()
  where w.worker_id = p_worker_id
  returning w.deprecated_at is null and w.stopped_at is null into v_alive;
  return coalesce(v_alive, false);
end
$$;

-- Workers of this runtime that have been silent for so many seconds and still hold tasks.
create or replace function pgflow_otp.silent_workers(p_silence double precision) returns setof uuid
language sql stable set search_path to '' as $$
  select w.worker_id
  from pgflow.workers w
  where w.function_name like 'python:%'
    and w.last_heartbeat_at < clock_timestamp() - make_interval(secs => p_silence)
    and exists (
      select from pgflow.step_tasks t where t.last_worker_id = w.worker_id and t.status = 'started')
$$;
