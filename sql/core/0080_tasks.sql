-- The life of a task: claimed, completed, failed.

-- Claim the tasks of messages that were just read. The task rows come first, then the messages; a message that cannot
-- be extended undoes the whole claim, since another worker would see it again while the task runs.
create function pgflow.start_tasks(
  flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text, step_slug text
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' set plan_cache_mode to force_custom_plan as $$
declare
  v_queue_mode text;
  v_run_ids uuid[];
  v_step_slugs text[];
  v_task_indexes int[];
  v_message_ids bigint[];
  v_attempts int[];
  v_offsets int[];
  v_extended int;
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

  with candidates as materialized (
    select t.run_id, t.step_slug, t.task_index
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    where t.flow_slug = start_tasks.flow_slug
      and t.queue_name = start_tasks.queue_name
      and t.message_id = any (start_tasks.msg_ids)
      and (start_tasks.step_slug is null or t.step_slug = start_tasks.step_slug)
      and t.status = 'queued'
      and r.status = 'started'
      and ss.status = 'started'
    -- Whoever holds a task is about to change it: waiting for it here, with others already locked, could deadlock.
    order by t.run_id, t.step_slug, t.task_index
    for update of t skip locked
  ), claimed as (
    update pgflow.step_tasks t
    set status = 'started',
        attempts_count = t.attempts_count + 1,
        started_at = greatest(now(), t.queued_at),
        last_worker_id = start_tasks.worker_id
    from candidates c
    where t.run_id = c.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
      and t.status = 'queued'
    returning t.flow_slug, t.run_id, t.step_slug, t.task_index, t.message_id, t.attempts_count
  )
  select
    array_agg(c.run_id order by c.message_id),
    array_agg(c.step_slug order by c.message_id),
    array_agg(c.task_index order by c.message_id),
    array_agg(c.message_id order by c.message_id),
    array_agg(c.attempts_count order by c.message_id),
    array_agg(coalesce(st.opt_timeout, f.opt_timeout) + 2 order by c.message_id)
  into v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts, v_offsets
  from claimed c
  join pgflow.steps st on st.flow_slug = c.flow_slug and st.step_slug = c.step_slug
  join pgflow.flows f on f.flow_slug = c.flow_slug;
  if v_message_ids is null then
    return;
  end if;

  select count(*) into v_extended
  from pgflow.set_vt_batch(start_tasks.queue_name, v_message_ids, v_offsets);
  if v_extended <> cardinality(v_message_ids) then
    raise invalid_text_representation using message = format(
      'invalid input syntax for type integer: "start_tasks(): visibility updated %s of %s claimed messages"',
      v_extended, cardinality(v_message_ids));
  end if;

  return query
  with claimed as (
    select *
    from unnest(v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts)
      as u(run_id, step_slug, task_index, message_id, attempts_count)
  ), inputs as materialized (
    -- Once per step of a run, not once per task: a map's array is gathered a single time.
    select k.run_id, k.step_slug, st.step_type, st.deps_count,
      case when st.deps_count = 0 then r.input end as run_input,
      case
        when st.step_type = 'map' and st.deps_count = 0 then r.input
        when st.step_type = 'map' then (
          select ds.output
          from pgflow.deps d
          join pgflow.step_states ds on ds.run_id = k.run_id and ds.step_slug = d.dep_slug
          where d.flow_slug = start_tasks.flow_slug and d.step_slug = k.step_slug and ds.status = 'completed'
        )
        else (
          select coalesce(jsonb_object_agg(ds.step_slug, coalesce(ds.output, 'null'::jsonb)), '{}'::jsonb)
          from pgflow.deps d
          join pgflow.step_states ds on ds.run_id = k.run_id and ds.step_slug = d.dep_slug
          where d.flow_slug = start_tasks.flow_slug and d.step_slug = k.step_slug and ds.status = 'completed'
        )
      end as input
    from (select distinct c.run_id, c.step_slug from claimed c) k
    join pgflow.runs r on r.run_id = k.run_id
    join pgflow.steps st on st.flow_slug = start_tasks.flow_slug and st.step_slug = k.step_slug
  )
  select
    start_tasks.flow_slug,
    c.run_id,
    c.step_slug,
    case when i.step_type = 'map' then i.input -> c.task_index else i.input end,
    c.message_id,
    c.task_index,
    case when i.step_type = 'single' then i.run_input end,
    c.attempts_count
  from claimed c
  join inputs i on i.run_id = c.run_id and i.step_slug = c.step_slug;
end
$$;

create function pgflow.start_tasks(flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text)
returns setof pgflow.step_task_record
language sql volatile set search_path to '' as $$
  select * from pgflow.start_tasks(
    start_tasks.flow_slug, start_tasks.msg_ids, start_tasks.worker_id, start_tasks.queue_name, null::text)
$$;

-- Polling used to be one call; it claims nothing any more.
create function pgflow.poll_for_tasks(
  queue_name text, vt int, qty int, max_poll_seconds int default 5, poll_interval_ms int default 100
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' as $$
begin
  raise notice 'DEPRECATED: poll_for_tasks is deprecated and returns no tasks. Read with pgmq.read, then call start_tasks.';
end
$$;

-- Fail a run because a single step gave something else than an array to a map. No policy softens it.
create function pgflow_otp._fail_type_violation(
  p_run pgflow.runs, p_step_slug text, p_task_index int, p_output jsonb, p_child_slug text
) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_kind constant text := coalesce(jsonb_typeof(p_output), 'null');
  v_error constant text := format(
    '[TYPE_VIOLATION] Map step %s expects array input but dependency %s produced %s',
    p_child_slug, p_step_slug, v_kind);
begin
  update pgflow.step_tasks t
  set status = 'failed', failed_at = now(), output = p_output,
      error_message = format('[TYPE_VIOLATION] Produced %s instead of array', v_kind)
  where t.run_id = p_run.run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;

  update pgflow.runs r set status = 'failed', failed_at = now() where r.run_id = p_run.run_id;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:failed', 'run_id', p_run.run_id, 'flow_slug', p_run.flow_slug, 'status', 'failed',
      'failed_at', now()),
    'run:failed', 'pgflow:run:' || p_run.run_id, false);

  update pgflow.step_states ss
  set status = 'failed', failed_at = now(), error_message = v_error
  where ss.run_id = p_run.run_id and ss.step_slug = p_step_slug;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'step:failed', 'run_id', p_run.run_id, 'step_slug', p_step_slug, 'status', 'failed',
      'error_message', v_error, 'failed_at', now()),
    'step:' || p_step_slug || ':failed', 'pgflow:run:' || p_run.run_id, false);

  perform pgflow_otp._end_open_tasks(p_run.run_id, null, 'cancelled');
  perform pgflow._archive_task_message(p_run.run_id, p_step_slug, p_task_index);
end
$$;

create function pgflow.complete_task(run_id uuid, step_slug text, task_index int, output jsonb)
returns setof pgflow.step_tasks
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_state pgflow.step_states;
  v_task pgflow.step_tasks;
  v_step_type text;
  v_child text;
  v_items int;
begin
  select * into v_task from pgflow.step_tasks t
  where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index;
  if not found then
    return;
  end if;
  if exists (select from pgflow.runs r where r.run_id = complete_task.run_id and r.status = 'failed') then
    return next v_task;
    return;
  end if;

  -- Whatever was read before these two locks is read again after them.
  select * into v_run from pgflow.runs r where r.run_id = complete_task.run_id for update;
  select * into v_state from pgflow.step_states ss
  where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug
  for update;
  if v_run.status = 'failed' or v_state.status <> 'started' then
    perform pgflow._archive_task_message(
      complete_task.run_id, complete_task.step_slug, complete_task.task_index);
    return query select * from pgflow.step_tasks t
      where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
        and t.task_index = complete_task.task_index;
    return;
  end if;

  select st.step_type into v_step_type
  from pgflow.steps st
  where st.flow_slug = v_run.flow_slug and st.step_slug = complete_task.step_slug;

  if v_step_type = 'single' and jsonb_typeof(complete_task.output) is distinct from 'array' then
    select c.step_slug into v_child
    from pgflow.deps d
    join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
    join pgflow.step_states cs on cs.run_id = complete_task.run_id and cs.step_slug = c.step_slug
    where d.flow_slug = v_run.flow_slug
      and d.dep_slug = complete_task.step_slug
      and c.step_type = 'map'
      and cs.initial_tasks is null
    order by c.step_index
    limit 1;
    if found then
      perform pgflow_otp._fail_type_violation(
        v_run, complete_task.step_slug, complete_task.task_index, complete_task.output, v_child);
      return query select * from pgflow.step_tasks t
        where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
          and t.task_index = complete_task.task_index;
      return;
    end if;
  end if;

  update pgflow.step_tasks t
  set status = 'completed', completed_at = greatest(now(), t.started_at), output = complete_task.output
  where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index and t.status = 'started'
  returning * into v_task;
  if found then
    if v_state.remaining_tasks > 1 then
      update pgflow.step_states ss
      set remaining_tasks = ss.remaining_tasks - 1
      where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug;
    else
      update pgflow.step_states ss
      set remaining_tasks = 0,
          status = 'completed',
          completed_at = now(),
          output = case
            when v_step_type = 'single' then complete_task.output
            else (
              select jsonb_agg(coalesce(t.output, 'null'::jsonb) order by t.task_index)
              from pgflow.step_tasks t
              where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
            )
          end
      where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug
      returning * into v_state;

      if jsonb_typeof(v_state.output) = 'array' then
        v_items := jsonb_array_length(v_state.output);
      end if;
      update pgflow.step_states cs
      set remaining_deps = cs.remaining_deps - 1,
          initial_tasks = case
            when c.step_type = 'map' and cs.initial_tasks is null then v_items
            else cs.initial_tasks
          end
      from pgflow.deps d
      join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
      where d.flow_slug = v_run.flow_slug
        and d.dep_slug = complete_task.step_slug
        and cs.run_id = complete_task.run_id
        and cs.step_slug = d.step_slug;

      update pgflow.runs r set remaining_steps = r.remaining_steps - 1 where r.run_id = complete_task.run_id;

      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:completed', 'run_id', v_state.run_id, 'step_slug', v_state.step_slug,
          'status', 'completed', 'output', v_state.output, 'completed_at', v_state.completed_at),
        'step:' || v_state.step_slug || ':completed', 'pgflow:run:' || v_state.run_id, false);

      if not pgflow_otp._settle_cascades(complete_task.run_id) then
        perform pgflow._archive_task_message(
          complete_task.run_id, complete_task.step_slug, complete_task.task_index);
        return next v_task;
        return;
      end if;
    end if;
  else
    -- Another call settled it, or nobody has claimed it: the row is returned as it is now.
    select * into v_task from pgflow.step_tasks t
    where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
      and t.task_index = complete_task.task_index;
  end if;

  if v_task.status = 'completed' and v_task.message_id is not null then
    perform pgmq.archive(v_task.queue_name, v_task.message_id);
  end if;
  if v_state.status = 'completed' then
    perform pgflow.start_ready_steps(complete_task.run_id);
    perform pgflow.maybe_complete_run(complete_task.run_id);
  end if;
  return next v_task;
end
$$;

create function pgflow.fail_task(run_id uuid, step_slug text, task_index int, error_message text)
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
    and t.task_index = fail_task.task_index and t.status = 'started'
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
