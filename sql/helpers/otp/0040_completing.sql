-- Completing tasks, one or many.

-- Fail a run because a single step gave something else than an array to a map. No policy softens it.
create or replace function pgflow_otp._fail_type_violation(
  p_run_id uuid, p_flow_slug text, p_step_slug text, p_task_index int, p_output jsonb, p_child_slug text
) returns void
language plpgsql volatile as $$
declare
  v_kind constant text := coalesce(jsonb_typeof(p_output), 'null');
  v_error constant text := format(
    '[TYPE_VIOLATION] Map step %s expects array input but dependency %s produced %s',
    p_child_slug, p_step_slug, v_kind);
begin
  update pgflow.step_tasks t
  set status = 'failed', failed_at = greatest(now(), t.started_at), output = p_output,
      error_message = format('[TYPE_VIOLATION] Produced %s instead of array', v_kind)
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;

  update pgflow.runs r set status = 'failed', failed_at = now() where r.run_id = p_run_id;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:failed', 'run_id', p_run_id, 'flow_slug', p_flow_slug, 'status', 'failed',
      'failed_at', now()),
    'run:failed', 'pgflow:run:' || p_run_id, false);

  update pgflow.step_states ss
  set status = 'failed', failed_at = now(), error_message = v_error
  where ss.run_id = p_run_id and ss.step_slug = p_step_slug;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'step:failed', 'run_id', p_run_id, 'step_slug', p_step_slug, 'status', 'failed',
      'error_message', v_error, 'failed_at', now()),
    'step:' || p_step_slug || ':failed', 'pgflow:run:' || p_run_id, false);

  perform pgflow_otp._end_open_tasks(p_run_id, null, 'cancelled');
  perform pgflow._archive_task_message(p_run_id, p_step_slug, p_task_index);
end
$$;

-- Complete one task and do all that follows. The caller holds the row of the run, which has not failed. The same as
-- _complete_tasks of one, in statements that cost a third less: what one does, the other has to do.
create or replace function pgflow_otp._complete_task(
  p_run_id uuid, p_step_slug text, p_task_index int, p_output jsonb
) returns void
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_flow_slug text;
  v_status text;
  v_remaining int;
  v_step_type text;
  v_has_children boolean;
  v_child text;
  v_queue_name text;
  v_message_id bigint;
  v_output jsonb := p_output;
  v_items int;
  v_released record;
  v_started text[] := '{}';
  v_is_cascading boolean := false;
begin
  select ss.flow_slug, ss.status, ss.remaining_tasks, st.step_type,
    exists (select from pgflow.deps d where d.flow_slug = st.flow_slug and d.dep_slug = st.step_slug)
  into v_flow_slug, v_status, v_remaining, v_step_type, v_has_children
  from pgflow.step_states ss
  join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
  where ss.run_id = p_run_id and ss.step_slug = p_step_slug
  for update of ss;
  if v_status <> 'started' then
    perform pgflow._archive_task_message(p_run_id, p_step_slug, p_task_index);
    return;
  end if;

  if v_has_children and v_step_type = 'single' and jsonb_typeof(p_output) is distinct from 'array' then
    v_child := pgflow_otp._map_without_array(p_run_id, v_flow_slug, p_step_slug);
    if v_child is not null then
      if exists (
        select from pgflow.step_tasks t
        where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
      ) then
        perform pgflow_otp._fail_type_violation(
          p_run_id, v_flow_slug, p_step_slug, p_task_index, p_output, v_child);
      end if;
      return;
    end if;
  end if;

  update pgflow.step_tasks t
  set status = 'completed', completed_at = greatest(now(), t.started_at), output = p_output
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
    and t.status is not distinct from 'started'
  returning t.queue_name, t.message_id into v_queue_name, v_message_id;
  if not found then
    return;
  end if;
  if v_step_type = 'map' then
    perform pgflow_otp._drop_items(array[p_run_id], array[p_step_slug], array[p_task_index]);
  end if;

  if v_remaining > 1 then
    update pgflow.step_states ss
    set remaining_tasks = ss.remaining_tasks - 1
    where ss.run_id = p_run_id and ss.step_slug = p_step_slug;
    if v_message_id is not null then
      perform pgmq.archive(v_queue_name, v_message_id);
    end if;
    return;
  end if;

  if v_step_type = 'map' then
    select jsonb_agg(coalesce(t.output, 'null'::jsonb) order by t.task_index) into v_output
    from pgflow.step_tasks t
    where t.run_id = p_run_id and t.step_slug = p_step_slug;
  end if;
  update pgflow.step_states ss
  set remaining_tasks = 0, status = 'completed', completed_at = now(), output = v_output
  where ss.run_id = p_run_id and ss.step_slug = p_step_slug;

  if v_has_children then
    v_items := case when jsonb_typeof(v_output) = 'array' then jsonb_array_length(v_output) end;
    for v_released in select * from pgflow_otp._release_children(p_run_id, v_flow_slug, p_step_slug, v_items) loop
      if v_released.status = 'started' then
        v_started := array_append(v_started, v_released.step_slug);
      else
        v_is_cascading := true;
      end if;
    end loop;
  end if;

  update pgflow.runs r
  set remaining_steps = r.remaining_steps - 1,
      status = case when r.remaining_steps = 1 then 'completed' else r.status end,
      completed_at = case when r.remaining_steps = 1 then now() end,
      output = case when r.remaining_steps = 1 then pgflow_otp._run_output(r.run_id, r.flow_slug) end
  where r.run_id = p_run_id
  returning r.status into v_status;

  perform realtime.send(
    jsonb_build_object(
      'event_type', 'step:completed', 'run_id', p_run_id, 'step_slug', p_step_slug, 'status', 'completed',
      'output', v_output, 'completed_at', now()),
    'step:' || p_step_slug || ':completed', 'pgflow:run:' || p_run_id, false);
  if v_is_cascading and pgflow_otp._settle_cascades(p_run_id) then
    perform pgflow.start_ready_steps(p_run_id);
    perform pgflow.maybe_complete_run(p_run_id);
  end if;
  -- Tasks before messages: a condition may have ended others of the run's tasks just now.
  if v_message_id is not null then
    perform pgmq.archive(v_queue_name, v_message_id);
  end if;
  if v_started <> '{}' then
    perform pgflow_otp._send_tasks(array_fill(p_run_id, array[cardinality(v_started)]), v_started);
  end if;
  if v_status = 'completed' then
    perform pgflow_otp._announce_end(p_run_id);
  end if;
end
$$;

-- Count a completed step down in its children; returns those that are ready by that. A child that is ready starts right
-- here, unless its flow has conditions (they are judged before anything starts) or it has no tasks.
create or replace function pgflow_otp._release_children(
  p_run_id uuid, p_flow_slug text, p_step_slug text, p_items int
) returns table (step_slug text, status text)
language plpgsql volatile as $$
declare
  v_is_plain boolean;
  v_child record;
  v_tasks int;
  v_starts boolean;
begin
  for v_child in
    select cs.step_slug, cs.status, cs.remaining_deps, cs.initial_tasks, c.step_type
    from pgflow.deps d
    join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
    join pgflow.step_states cs on cs.run_id = p_run_id and cs.step_slug = d.step_slug
    where d.flow_slug = p_flow_slug and d.dep_slug = p_step_slug
    order by cs.step_slug
  loop
    v_tasks := v_child.initial_tasks;
    if v_child.step_type = 'map' and v_tasks is null then
      v_tasks := p_items;
    end if;
    v_starts := v_child.remaining_deps = 1 and v_child.status = 'created' and v_tasks > 0;
    if v_starts then
      if v_is_plain is null then
        v_is_plain := not exists (
          select from pgflow.steps st
          where st.flow_slug = p_flow_slug
            and (st.required_input_pattern is not null or st.forbidden_input_pattern is not null));
      end if;
      v_starts := v_is_plain;
    end if;
    if v_starts then
      update pgflow.step_states ss
      set remaining_deps = 0, initial_tasks = v_tasks, remaining_tasks = v_tasks, status = 'started', started_at = now()
      where ss.run_id = p_run_id and ss.step_slug = v_child.step_slug;
    else
      update pgflow.step_states ss
      set remaining_deps = ss.remaining_deps - 1, initial_tasks = v_tasks
      where ss.run_id = p_run_id and ss.step_slug = v_child.step_slug;
    end if;
    if v_child.remaining_deps = 1 and v_child.status = 'created' then
      step_slug := v_child.step_slug;
      status := case when v_starts then 'started' else 'created' end;
      return next;
    end if;
  end loop;
end
$$;

-- The first map step that would take this step's output for its items, and does not know their number yet.
create or replace function pgflow_otp._map_without_array(p_run_id uuid, p_flow_slug text, p_step_slug text)
returns text
language plpgsql stable as $$
begin
  return (
    select c.step_slug
    from pgflow.deps d
    join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
    join pgflow.step_states cs on cs.run_id = p_run_id and cs.step_slug = c.step_slug
    where d.flow_slug = p_flow_slug and d.dep_slug = p_step_slug and c.step_type = 'map' and cs.initial_tasks is null
    order by c.step_index
    limit 1);
end
$$;

-- Complete tasks of one step each of any number of runs, and do all that follows. The caller holds the rows of the runs.
-- With a worker, only what it still holds by the claim of p_started_ats counts. Everything happens as if the tasks came
-- one after the other in calls of their own: per run, the step's event, then conditions, then steps without tasks, then
-- the steps that start, then the end of the run.
create or replace function pgflow_otp._complete_tasks(
  p_run_ids uuid[], p_step_slugs text[], p_task_indexes int[], p_outputs jsonb[],
  p_worker_id uuid default null, p_started_ats timestamptz[] default null
) returns void
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_odd record;
  v_has_map boolean;
  -- tasks that are completed here
  v_run_ids uuid[];
  v_step_slugs text[];
  v_task_indexes int[];
  v_queue_names text[];
  v_message_ids bigint[];
  -- steps that are completed by that, and how many items their output has
  v_done_runs uuid[];
  v_done_steps text[];
  v_done_items int[];
  -- children that have become ready: started here, or left to the cascades of their run
  v_started_runs uuid[];
  v_started_steps text[];
  v_cascading uuid[];
  v_ended_runs uuid[];
begin
  -- The states' locks. What is late has its message archived; an output that its map cannot use fails the run.
  for v_odd in
    with locked as materialized (
      select ss.run_id, ss.step_slug, ss.flow_slug, ss.status, st.step_type
      from (select distinct k.run_id, k.step_slug from unnest(p_run_ids, p_step_slugs) as k(run_id, step_slug)) k
      join pgflow.step_states ss on ss.run_id = k.run_id and ss.step_slug = k.step_slug
      join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
      order by ss.run_id, ss.step_slug
      for update of ss
    )
    select i.run_id, i.step_slug, i.task_index, i.output, i.started_at, l.status, l.flow_slug, v.child
    from unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outputs, p_started_ats)
      as i(run_id, step_slug, task_index, output, started_at)
    join locked l on l.run_id = i.run_id and l.step_slug = i.step_slug
    left join lateral (
      select c.step_slug as child
      from pgflow.deps d
      join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
      join pgflow.step_states cs on cs.run_id = i.run_id and cs.step_slug = c.step_slug
      where l.step_type = 'single'
        and jsonb_typeof(i.output) is distinct from 'array'
        and d.flow_slug = l.flow_slug and d.dep_slug = i.step_slug
        and c.step_type = 'map' and cs.initial_tasks is null
      order by c.step_index
      limit 1
    ) v on true
    where l.status <> 'started' or v.child is not null
  loop
    if p_worker_id is not null and not exists (
      select from pgflow.step_tasks t
      where t.run_id = v_odd.run_id and t.step_slug = v_odd.step_slug and t.task_index = v_odd.task_index
        and t.status = 'started' and t.last_worker_id = p_worker_id and t.started_at = v_odd.started_at
    ) then
      continue;
    end if;
    if v_odd.status <> 'started' then
      perform pgflow._archive_task_message(v_odd.run_id, v_odd.step_slug, v_odd.task_index);
    elsif exists (
      select from pgflow.step_tasks t
      where t.run_id = v_odd.run_id and t.step_slug = v_odd.step_slug and t.task_index = v_odd.task_index
    ) then
      perform pgflow_otp._fail_type_violation(
        v_odd.run_id, v_odd.flow_slug, v_odd.step_slug, v_odd.task_index, v_odd.output, v_odd.child);
    end if;
  end loop;

  with completed as (
    update pgflow.step_tasks t
    set status = 'completed', completed_at = greatest(now(), t.started_at), output = i.output
    from unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outputs, p_started_ats)
      as i(run_id, step_slug, task_index, output, started_at)
    join pgflow.step_states ss on ss.run_id = i.run_id and ss.step_slug = i.step_slug
      and ss.status is not distinct from 'started'
    where t.run_id = i.run_id and t.step_slug = i.step_slug and t.task_index = i.task_index
      -- written so that no index on these columns is taken for the key's
      and t.status is not distinct from 'started'
      and (p_worker_id is null or (
        t.last_worker_id is not distinct from p_worker_id and t.started_at is not distinct from i.started_at))
    returning t.run_id, t.step_slug, t.task_index, t.queue_name, t.message_id
  )
  select
    array_agg(c.run_id), array_agg(c.step_slug), array_agg(c.task_index), array_agg(c.queue_name),
    array_agg(c.message_id)
  into v_run_ids, v_step_slugs, v_task_indexes, v_queue_names, v_message_ids
  from completed c;
  if v_run_ids is null then
    return;
  end if;

  with counted as (
    update pgflow.step_states ss
    set remaining_tasks = ss.remaining_tasks - k.tasks,
        status = case when ss.remaining_tasks > k.tasks then ss.status else 'completed' end,
        completed_at = case when ss.remaining_tasks > k.tasks then null else now() end,
        output = case
          when ss.remaining_tasks > k.tasks then null
          when st.step_type = 'single' then (
            select t.output from pgflow.step_tasks t
            where t.run_id = ss.run_id and t.step_slug = ss.step_slug and t.task_index = 0
          )
          else (
            select jsonb_agg(coalesce(t.output, 'null'::jsonb) order by t.task_index)
            from pgflow.step_tasks t
            where t.run_id = ss.run_id and t.step_slug = ss.step_slug
          )
        end
    from (
      select u.run_id, u.step_slug, count(*)::int as tasks
      from unnest(v_run_ids, v_step_slugs) as u(run_id, step_slug)
      group by u.run_id, u.step_slug
    ) k
    join pgflow.step_states b on b.run_id = k.run_id and b.step_slug = k.step_slug
    join pgflow.steps st on st.flow_slug = b.flow_slug and st.step_slug = b.step_slug
    where ss.run_id = b.run_id and ss.step_slug = b.step_slug
    returning ss.run_id, ss.step_slug, ss.status, st.step_type,
      case when ss.status = 'completed' and jsonb_typeof(ss.output) = 'array' then jsonb_array_length(ss.output) end
        as items
  )
  select
    bool_or(c.step_type = 'map'),
    array_agg(c.run_id order by c.run_id) filter (where c.status = 'completed'),
    array_agg(c.step_slug order by c.run_id) filter (where c.status = 'completed'),
    array_agg(c.items order by c.run_id) filter (where c.status = 'completed')
  into v_has_map, v_done_runs, v_done_steps, v_done_items
  from counted c;

  if v_has_map then
    perform pgflow_otp._drop_items(v_run_ids, v_step_slugs, v_task_indexes);
  end if;

  if v_done_runs is not null then
    -- A child that is ready starts right here, unless its flow has conditions: they are judged before anything starts.
    with released as (
      update pgflow.step_states cs
      set remaining_deps = cs.remaining_deps - 1,
          initial_tasks = case
            when c.step_type = 'map' and cs.initial_tasks is null then p.items else cs.initial_tasks
          end,
          status = case when s.starts and cs.status = 'created' then 'started' else cs.status end,
          started_at = case when s.starts and cs.status = 'created' then now() else cs.started_at end,
          remaining_tasks = case when s.starts and cs.status = 'created' then s.tasks else cs.remaining_tasks end
      from unnest(v_done_runs, v_done_steps, v_done_items) as p(run_id, step_slug, items)
      join pgflow.runs r on r.run_id = p.run_id
      join pgflow.deps d on d.flow_slug = r.flow_slug and d.dep_slug = p.step_slug
      join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
      join pgflow.step_states b on b.run_id = p.run_id and b.step_slug = c.step_slug -- as it was before
      cross join lateral (
        select n.tasks,
          b.remaining_deps = 1 and n.tasks > 0 and not exists (
            select from pgflow.steps st
            where st.flow_slug = r.flow_slug
              and (st.required_input_pattern is not null or st.forbidden_input_pattern is not null)
          ) as starts
        from (
          select case when c.step_type = 'map' and b.initial_tasks is null then p.items else b.initial_tasks end as tasks
        ) n
      ) s
      where cs.run_id = p.run_id and cs.step_slug = c.step_slug
      returning cs.run_id, cs.step_slug, cs.status, cs.remaining_deps
    )
    select
      array_agg(k.run_id order by k.run_id, k.step_slug) filter (where k.status = 'started'),
      array_agg(k.step_slug order by k.run_id, k.step_slug) filter (where k.status = 'started'),
      array_agg(distinct k.run_id) filter (where k.status = 'created')
    into v_started_runs, v_started_steps, v_cascading
    from released k
    where k.remaining_deps = 0;

    with counted as (
      update pgflow.runs r
      set remaining_steps = r.remaining_steps - 1,
          status = case when r.remaining_steps = 1 then 'completed' else r.status end,
          completed_at = case when r.remaining_steps = 1 then now() end,
          output = case when r.remaining_steps = 1 then pgflow_otp._run_output(r.run_id, r.flow_slug) end
      from unnest(v_done_runs) as p(run_id)
      where r.run_id = p.run_id
      returning r.run_id, r.status
    )
    select array_agg(c.run_id) filter (where c.status = 'completed') into v_ended_runs from counted c;

    for i in 1 .. cardinality(v_done_runs) loop
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:completed', 'run_id', ss.run_id, 'step_slug', ss.step_slug, 'status', 'completed',
          'output', ss.output, 'completed_at', ss.completed_at),
        'step:' || ss.step_slug || ':completed', 'pgflow:run:' || ss.run_id, false)
      from pgflow.step_states ss
      where ss.run_id = v_done_runs[i] and ss.step_slug = v_done_steps[i];
    end loop;
  end if;

  for i in 1 .. coalesce(cardinality(v_cascading), 0) loop
    if pgflow_otp._settle_cascades(v_cascading[i]) then
      perform pgflow.start_ready_steps(v_cascading[i]);
      perform pgflow.maybe_complete_run(v_cascading[i]);
    end if;
  end loop;
  perform pgflow_otp._archive_messages(v_queue_names, v_message_ids);
  if v_started_runs is not null then
    perform pgflow_otp._send_tasks(v_started_runs, v_started_steps);
  end if;
  for i in 1 .. coalesce(cardinality(v_ended_runs), 0) loop
    perform pgflow_otp._announce_end(v_ended_runs[i]);
  end loop;
end
$$;

-- What a completed run gives: the outputs of the completed steps that nothing depends on.
create or replace function pgflow_otp._run_output(p_run_id uuid, p_flow_slug text) returns jsonb
language plpgsql stable as $$
declare
  v_output jsonb;
begin
  select jsonb_object_agg(ss.step_slug, ss.output) into v_output
  from pgflow.step_states ss
  where ss.run_id = p_run_id
    and ss.status = 'completed'
    and not exists (
      select from pgflow.deps d where d.flow_slug = p_flow_slug and d.dep_slug = ss.step_slug
    );
  return v_output;
end
$$;

create or replace function pgflow_otp._announce_end(p_run_id uuid) returns void
language plpgsql volatile as $$
begin
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:completed', 'run_id', r.run_id, 'flow_slug', r.flow_slug,
      'status', 'completed', 'output', r.output, 'completed_at', r.completed_at),
    'run:completed', 'pgflow:run:' || r.run_id, false)
  from pgflow.runs r
  where r.run_id = p_run_id;
end
$$;
