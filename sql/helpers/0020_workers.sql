-- What this runtime's workers call: one round trip per decision, and no answer of an overtaken attempt accepted.

-- Read messages and claim their tasks in one trip. The worker's row is held FOR KEY SHARE and a stopped worker claims
-- nothing: release_worker takes that row FOR UPDATE first, so that a claim which a killed worker left in flight cannot
-- slip in behind the release. Task rows are taken with SKIP LOCKED, so a claim waits for nobody; the message of a task
-- that somebody holds is visible again at once.
create function pgflow_otp.claim_tasks(
  p_flow_slug text, p_queue_name text, p_worker_id uuid, p_visibility int, p_quantity int
) returns table (
  run_id uuid, step_slug text, task_index int, attempt int, max_attempts int, started_at timestamptz, timeout int,
  input jsonb, flow_input jsonb
)
language plpgsql volatile set search_path to '' as $$
declare
  v_read_ids bigint[];
  v_message_ids bigint[];
begin
  perform from pgflow.workers w
  where w.worker_id = p_worker_id and w.stopped_at is null and w.deprecated_at is null
  for key share;
  if not found then
    return;
  end if;

  select array_agg(m.msg_id) into v_read_ids
  from pgmq.read(queue_name => p_queue_name, vt => p_visibility, qty => coalesce(p_quantity, 0)) m;
  if v_read_ids is null then
    return;
  end if;

  select array_agg(locked.message_id) into v_message_ids
  from (
    select t.message_id
    from pgflow.step_tasks t
    where t.queue_name = p_queue_name and t.message_id = any (v_read_ids) and t.status = 'queued'
    order by t.run_id, t.step_slug, t.task_index
    for update skip locked
  ) locked;

  if coalesce(cardinality(v_message_ids), 0) < cardinality(v_read_ids) then
    perform pgflow.set_vt_batch(p_queue_name, held.ids, array_fill(0, array[cardinality(held.ids)]))
    from (
      select array_agg(t.message_id) as ids
      from pgflow.step_tasks t
      where t.queue_name = p_queue_name
        and t.message_id = any (v_read_ids)
        and t.message_id <> all (coalesce(v_message_ids, '{}'))
        and t.status = 'queued'
    ) held
    where held.ids is not null;
  end if;

  -- This query's snapshot is older than what start_tasks does in it: started_at is written down again as it sets it.
  return query
  select c.run_id, c.step_slug, c.task_index, c.attempts_count,
    coalesce(st.opt_max_attempts, f.opt_max_attempts), greatest(now(), t.queued_at), coalesce(st.opt_timeout, f.opt_timeout),
    c.input, c.flow_input
  from pgflow.start_tasks(p_flow_slug, v_message_ids, p_worker_id, p_queue_name) c
  join pgflow.step_tasks t on t.run_id = c.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
  join pgflow.steps st on st.flow_slug = c.flow_slug and st.step_slug = c.step_slug
  join pgflow.flows f on f.flow_slug = c.flow_slug;
end
$$;

-- Fail a task whatever attempts it has left. The count is raised only while fail_task decides, so that what is stored
-- says how often the handler really ran.
create function pgflow_otp._fail_for_good(p_run_id uuid, p_step_slug text, p_task_index int, p_error text)
returns text
language plpgsql volatile set search_path to '' as $$
declare
  v_attempts int;
  v_status text;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  perform from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug for update;
  select t.attempts_count into v_attempts
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index and t.status = 'started'
  for update;
  if found then
    update pgflow.step_tasks t
    set attempts_count = 2147483647
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
    perform pgflow.fail_task(p_run_id, p_step_slug, p_task_index, p_error);
    update pgflow.step_tasks t
    set attempts_count = v_attempts
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
  end if;
  select t.status into v_status
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
  return v_status;
end
$$;

-- Record the outcome of one attempt: 'completed', 'failed' (retried as the policy says), 'failed_for_good', 'released'
-- (handed back; costs no attempt), or 'crashed' (the same, but counted: the third time the task fails). The attempt is known by its claim, (worker, started_at): attempt numbers
-- repeat after a release. Returns the task's status, or 'overtaken' when another claim has it by now.
create function pgflow_otp.settle_task(
  p_run_id uuid, p_step_slug text, p_task_index int, p_worker_id uuid, p_started_at timestamptz,
  p_outcome text, p_output jsonb, p_error text
) returns text
language plpgsql volatile set search_path to '' as $$
declare
  v_task pgflow.step_tasks;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  perform from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug for update;
  select * into v_task
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
  for update;
  if not found then
    return 'gone';
  elsif v_task.last_worker_id is distinct from p_worker_id or v_task.started_at is distinct from p_started_at then
    return case when v_task.status in ('queued', 'started') then 'overtaken' else v_task.status end;
  elsif v_task.status <> 'started' then
    return v_task.status;
  end if;

  if v_task.permanently_stalled_at is not null and p_outcome in ('released', 'crashed') then
    -- Its message is archived already: nobody could claim it again.
    v_task.status := pgflow_otp._fail_for_good(
      p_run_id, p_step_slug, p_task_index,
      coalesce(p_error, format('Task stalled: no answer from its worker, requeued %s times', v_task.requeued_count)));
  elsif p_outcome = 'completed' then
    select c.status into v_task.status from pgflow.complete_task(p_run_id, p_step_slug, p_task_index, p_output) c;
  elsif p_outcome = 'failed' then
    select c.status into v_task.status from pgflow.fail_task(p_run_id, p_step_slug, p_task_index, p_error) c;
  elsif p_outcome = 'failed_for_good' then
    v_task.status := pgflow_otp._fail_for_good(p_run_id, p_step_slug, p_task_index, p_error);
  elsif p_outcome = 'crashed' and v_task.requeued_count >= 2 then
    v_task.status := pgflow_otp._fail_for_good(p_run_id, p_step_slug, p_task_index, p_error);
  elsif p_outcome in ('released', 'crashed') then
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        attempts_count = greatest(t.attempts_count - 1, 0),
        requeued_count = t.requeued_count + case when p_outcome = 'crashed' then 1 else 0 end,
        last_requeued_at = case when p_outcome = 'crashed' then now() else t.last_requeued_at end
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
    returning t.status into v_task.status;
    if v_task.message_id is not null then
      perform pgmq.set_vt(v_task.queue_name, v_task.message_id, 0);
    end if;
  else
    raise exception 'unknown outcome "%": use completed, failed, failed_for_good, released or crashed', p_outcome;
  end if;
  return v_task.status;
end
$$;

-- Hand back what a dead worker had claimed, at no cost of an attempt. A task that was running when its worker died
-- for the third time is left for fail_crashed_tasks. Rows that somebody else holds are skipped and counted in
-- remaining: call again until it is 0.
create function pgflow_otp.release_worker(p_worker_id uuid, out released int, out crashed int, out remaining int)
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
    returning t.queue_name, t.message_id
  ), visible as (
    select v.msg_id
    from (
      select a.queue_name, array_agg(a.message_id) as ids
      from again a where a.message_id is not null group by a.queue_name
    ) q
    cross join lateral pgflow.set_vt_batch(q.queue_name, q.ids, array_fill(0, array[cardinality(q.ids)])) v
  )
  select (select count(*) from again), (select count(*) from visible) into released, v_visible;

  select
    count(*) filter (where t.requeued_count >= 2), count(*) filter (where t.requeued_count < 2)
  into crashed, remaining
  from pgflow.step_tasks t
  where t.last_worker_id = p_worker_id and t.status = 'started' and t.permanently_stalled_at is null;
end
$$;

create function pgflow_otp.fail_crashed_tasks(p_worker_id uuid) returns int
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
create function pgflow_otp.heartbeat(p_worker_id uuid) returns boolean
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
create function pgflow_otp.silent_workers(p_silence double precision) returns setof uuid
language sql stable set search_path to '' as $$
  select w.worker_id
  from pgflow.workers w
  where w.function_name like 'python:%'
    and w.last_heartbeat_at < clock_timestamp() - make_interval(secs => p_silence)
    and exists (
      select from pgflow.step_tasks t where t.last_worker_id = w.worker_id and t.status = 'started')
$$;
