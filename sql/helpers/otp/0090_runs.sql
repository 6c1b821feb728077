-- What people do to runs by hand.

-- End a started run: it fails with 'Run cancelled', its open tasks are cancelled, what is finished stays. A handler that
-- runs is not reached from here; its answer will be late. Errors: no_data_found for an unknown run,
-- object_not_in_prerequisite_state for one that has ended.
create or replace function pgflow_otp.cancel_run(p_run_id uuid, p_reason text default null) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_flow_slug text;
begin
  v_flow_slug := pgflow_otp._lock_run(p_run_id, 'started', 'cancelled');
  update pgflow.runs r set status = 'failed', failed_at = now() where r.run_id = p_run_id;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:failed', 'run_id', p_run_id, 'flow_slug', v_flow_slug, 'status', 'failed',
      'error_message', 'Run cancelled' || coalesce(': ' || p_reason, ''), 'failed_at', now()),
    'run:failed', 'pgflow:run:' || p_run_id, false);
  perform pgflow_otp._end_open_tasks(p_run_id, null, 'cancelled');
  insert into pgflow_otp.run_actions (run_id, action, reason) values (p_run_id, 'cancelled', p_reason);
end
$$;

-- Let a failed run go on where it stopped. What is completed or skipped stays; tasks that failed or were cancelled are
-- sent again with all their attempts; a step that failed by its condition is judged again. Errors as cancel_run.
create or replace function pgflow_otp.retry_run(p_run_id uuid, p_reason text default null) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_flow_slug text;
  v_steps text[];
  v_step record;
begin
  v_flow_slug := pgflow_otp._lock_run(p_run_id, 'failed', 'retried');
  insert into pgflow_otp.run_actions (run_id, action, reason) values (p_run_id, 'retried', p_reason);
  update pgflow.runs r set status = 'started', failed_at = null where r.run_id = p_run_id;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:started', 'run_id', r.run_id, 'flow_slug', r.flow_slug, 'status', 'started',
      'input', r.input, 'remaining_steps', r.remaining_steps, 'started_at', r.started_at),
    'run:started', 'pgflow:run:' || r.run_id, false)
  from pgflow.runs r
  where r.run_id = p_run_id;

  -- Steps that had started go on with the tasks they still have to do; a failed one that never had is judged again.
  update pgflow.step_states ss
  set failed_at = null, error_message = null,
      status = case when ss.started_at is null then 'created' else 'started' end,
      remaining_tasks = case
        when ss.started_at is not null then (
          select count(*) from pgflow.step_tasks t
          where t.run_id = ss.run_id and t.step_slug = ss.step_slug and t.status <> 'completed'
        )
      end
  where ss.run_id = p_run_id and ss.status in ('failed', 'started');
  select array_agg(ss.step_slug order by ss.step_slug) into v_steps
  from pgflow.step_states ss
  where ss.run_id = p_run_id and ss.status = 'started';

  for v_step in
    select t.step_slug, t.queue_name, array_agg(t.task_index order by t.task_index) as task_indexes,
      array_agg(jsonb_build_object(
        'flow_slug', t.flow_slug, 'run_id', t.run_id, 'step_slug', t.step_slug, 'task_index', t.task_index)
        order by t.task_index) as messages,
      array_agg(t.message_id) as message_ids
    from pgflow.step_tasks t
    where t.run_id = p_run_id and t.step_slug = any (v_steps) and t.status <> 'completed'
    group by t.step_slug, t.queue_name
  loop
    update pgflow.step_tasks t
    set status = 'queued', message_id = s.message_id, attempts_count = 0, error_message = null, output = null,
        queued_at = now(), started_at = null, failed_at = null, last_worker_id = null,
        requeued_count = 0, last_requeued_at = null, permanently_stalled_at = null
    from unnest(
      v_step.task_indexes, array(select m from pgmq.send_batch(v_step.queue_name, v_step.messages, 0) m)
    ) as s(task_index, message_id)
    where t.run_id = p_run_id and t.step_slug = v_step.step_slug and t.task_index = s.task_index;
    -- The old messages are archived as a rule; one that is not would be a second way to the same task.
    perform pgmq.archive(v_step.queue_name, v_step.message_ids);
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'step:started', 'run_id', ss.run_id, 'step_slug', ss.step_slug, 'status', 'started',
        'started_at', ss.started_at, 'remaining_tasks', ss.remaining_tasks, 'remaining_deps', ss.remaining_deps),
      'step:' || ss.step_slug || ':started', 'pgflow:run:' || ss.run_id, false)
    from pgflow.step_states ss
    where ss.run_id = p_run_id and ss.step_slug = v_step.step_slug;
    if exists (
      select from pgflow.steps st
      where st.flow_slug = v_flow_slug and st.step_slug = v_step.step_slug and st.step_type = 'map'
    ) then
      perform pgflow_otp._restore_items(
        p_run_id, v_step.step_slug, pgflow_otp._map_source(p_run_id, v_step.step_slug));
    end if;
  end loop;

  if pgflow_otp._settle_cascades(p_run_id) then
    perform pgflow.start_ready_steps(p_run_id);
    perform pgflow.maybe_complete_run(p_run_id);
  end if;
end
$$;

-- Take the row of a run that has to be in a certain state; returns its flow.
create or replace function pgflow_otp._lock_run(p_run_id uuid, p_status text, p_action text) returns text
language plpgsql volatile as $$
declare
  v_run record;
begin
  select r.flow_slug, r.status into v_run from pgflow.runs r where r.run_id = p_run_id for update;
  if not found then
    raise no_data_found using message = format('run %s does not exist', p_run_id);
  elsif v_run.status <> p_status then
    raise object_not_in_prerequisite_state using message = format(
      'run %s is %s: only a %s run can be %s', p_run_id, v_run.status, p_status, p_action);
  end if;
  return v_run.flow_slug;
end
$$;
