-- The life of a task: claimed, completed, failed.

-- Claim the tasks of messages that were just read. A message that cannot be extended undoes the whole claim, since
-- another worker would see it again while the task runs.
create or replace function pgflow.start_tasks(
  flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text, step_slug text
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' set plan_cache_mode to force_custom_plan as $$
declare
  v_queue_mode text;
begin
  select f.queue_mode into v_queue_mode from pgflow.flows f where f.flow_slug = start_tasks.flow_slug;
  if not found then
    return;
  end if;
  if v_queue_mode = 'step' then
    if start_tasks.step_slug is null then
      raise exception 'Flow "%" uses per-step queues: an exact step_slug is required to claim tasks.',
        start_tasks.flow_slug;
    end if;
    if not exists (
      select from pgflow.steps st
      where st.flow_slug = start_tasks.flow_slug
        and st.step_slug = start_tasks.step_slug
        and st.queue_name = start_tasks.queue_name
    ) then
      raise exception 'Step "%" does not route to queue "%" in flow "%".',
        start_tasks.step_slug, start_tasks.queue_name, start_tasks.flow_slug;
    end if;
  elsif start_tasks.step_slug is not null then
    raise exception 'Flow "%" uses the default flow queue: a step selector is not allowed.', start_tasks.flow_slug;
  end if;

  return query
  select start_tasks.flow_slug, c.run_id, c.step_slug, c.input, c.message_id, c.task_index, c.flow_input, c.attempt
  from pgflow_otp._claim_tasks(
    start_tasks.flow_slug, start_tasks.queue_name, start_tasks.step_slug, start_tasks.msg_ids,
    start_tasks.worker_id, 2, null) c;
end
$$;

create or replace function pgflow.start_tasks(flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text)
returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' as $$
begin
  return query select * from pgflow.start_tasks(
    start_tasks.flow_slug, start_tasks.msg_ids, start_tasks.worker_id, start_tasks.queue_name, null::text);
end
$$;

-- Polling used to be one call; it claims nothing any more.
create or replace function pgflow.poll_for_tasks(
  queue_name text, vt int, qty int, max_poll_seconds int default 5, poll_interval_ms int default 100
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' as $$
begin
  raise notice 'DEPRECATED: poll_for_tasks is deprecated and returns no tasks. Read with pgmq.read, then call start_tasks.';
end
$$;

create or replace function pgflow.complete_task(run_id uuid, step_slug text, task_index int, output jsonb)
returns setof pgflow.step_tasks
language plpgsql volatile set search_path to '' as $$
declare
  v_status text;
begin
  select r.status into v_status from pgflow.runs r where r.run_id = complete_task.run_id;
  if v_status <> 'failed' then
    -- What was read before this lock is read again after it.
    select r.status into v_status from pgflow.runs r where r.run_id = complete_task.run_id for update;
    if v_status = 'failed' then
      perform pgflow._archive_task_message(
        complete_task.run_id, complete_task.step_slug, complete_task.task_index);
    else
      perform pgflow_otp._complete_task(
        complete_task.run_id, complete_task.step_slug, complete_task.task_index, complete_task.output);
    end if;
  end if;
  return query
  select * from pgflow.step_tasks t
  where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index;
end
$$;

create or replace function pgflow.fail_task(run_id uuid, step_slug text, task_index int, error_message text)
returns setof pgflow.step_tasks
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_state pgflow.step_states;
  v_task pgflow.step_tasks;
  v_max_attempts int;
  v_base_delay int;
  v_when_exhausted text;
begin
  select * into v_run from pgflow.runs r where r.run_id = fail_task.run_id;
  if v_run.status = 'started' then
    select * into v_run from pgflow.runs r where r.run_id = fail_task.run_id for update;
    select * into v_state from pgflow.step_states ss
    where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug
    for update;
  end if;
  if v_run.status = 'failed' or v_state.status is distinct from 'started' then
    perform pgflow._archive_task_message(fail_task.run_id, fail_task.step_slug, fail_task.task_index);
    return query select * from pgflow.step_tasks t
      where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
        and t.task_index = fail_task.task_index;
    return;
  end if;

  select coalesce(st.opt_max_attempts, f.opt_max_attempts), coalesce(st.opt_base_delay, f.opt_base_delay),
    st.when_exhausted
  into v_max_attempts, v_base_delay, v_when_exhausted
  from pgflow.steps st
  join pgflow.flows f on f.flow_slug = st.flow_slug
  where st.flow_slug = v_run.flow_slug and st.step_slug = fail_task.step_slug;

  -- The message of a task that recovery gave up on is archived already: it cannot be tried again.
  update pgflow.step_tasks t
  set status = case when a.is_left then 'queued' else 'failed' end,
      started_at = case when a.is_left then null else t.started_at end,
      failed_at = case when a.is_left then null else greatest(now(), t.started_at) end,
      error_message = fail_task.error_message
  from (
    select s.attempts_count < v_max_attempts and s.permanently_stalled_at is null as is_left
    from pgflow.step_tasks s
    where s.run_id = fail_task.run_id and s.step_slug = fail_task.step_slug and s.task_index = fail_task.task_index
    for update
  ) a
  where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
    and t.task_index = fail_task.task_index
    and t.status is not distinct from 'started'
  returning t.* into v_task;

  if found and v_task.status = 'failed' then
    if v_when_exhausted = 'fail' then
      update pgflow.step_states ss
      set status = 'failed', failed_at = v_task.failed_at, error_message = fail_task.error_message
      where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug;
      update pgflow.runs r set status = 'failed', failed_at = v_task.failed_at where r.run_id = fail_task.run_id;
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:failed', 'run_id', v_run.run_id, 'step_slug', v_state.step_slug,
          'status', 'failed', 'error_message', fail_task.error_message, 'failed_at', v_task.failed_at),
        'step:' || v_state.step_slug || ':failed', 'pgflow:run:' || v_run.run_id, false);
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'run:failed', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug,
          'status', 'failed', 'error_message', fail_task.error_message, 'failed_at', v_task.failed_at),
        'run:failed', 'pgflow:run:' || v_run.run_id, false);
      perform pgflow_otp._end_open_tasks(v_run.run_id, null, 'cancelled');
    else
      update pgflow.step_states ss
      set status = 'skipped', skip_reason = 'handler_failed', skipped_at = now(), remaining_tasks = null,
          error_message = fail_task.error_message
      where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug;
      update pgflow.runs r set remaining_steps = r.remaining_steps - 1 where r.run_id = fail_task.run_id;
      perform pgflow_otp._end_open_tasks(v_run.run_id, array[v_state.step_slug], 'skipped');
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:skipped', 'run_id', v_run.run_id, 'step_slug', v_state.step_slug,
          'status', 'skipped', 'skip_reason', 'handler_failed', 'error_message', fail_task.error_message,
          'skipped_at', now()),
        'step:' || v_state.step_slug || ':skipped', 'pgflow:run:' || v_run.run_id, false);

      if v_when_exhausted = 'skip-cascade' then
        perform pgflow._cascade_force_skip_steps(v_run.run_id, v_state.step_slug, 'handler_failed');
      else
        perform pgflow_otp._release_children_of_skipped(
          v_run.run_id, v_run.flow_slug, array[v_state.step_slug]);
        if not pgflow_otp._settle_cascades(v_run.run_id) then
          perform pgflow._archive_task_message(fail_task.run_id, fail_task.step_slug, fail_task.task_index);
          return next v_task;
          return;
        end if;
        perform pgflow.start_ready_steps(v_run.run_id);
      end if;
      perform pgflow.maybe_complete_run(v_run.run_id);
    end if;
  elsif v_task.run_id is null then
    select * into v_task from pgflow.step_tasks t
    where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
      and t.task_index = fail_task.task_index;
    if not found then
      return;
    end if;
  end if;

  if v_task.message_id is not null then
    if v_task.status = 'queued' then
      perform pgmq.set_vt(
        v_task.queue_name, v_task.message_id,
        pgflow.calculate_retry_delay(v_base_delay, v_task.attempts_count));
    elsif v_task.status = 'failed' then
      perform pgmq.archive(v_task.queue_name, v_task.message_id);
    end if;
  end if;
  return next v_task;
end
$$;
