-- Claiming tasks: what every claim goes through, and our own claim that also reads the messages.

-- Claim the tasks of messages that were read from a queue. Nothing here waits for anybody: a task that another session
-- holds is passed over, since whoever holds it is about to change it, and its message comes back by itself. Tasks come
-- before messages. Each claimed message is hidden for the step's timeout and p_margin seconds, unless that is what
-- p_hidden_for says it is hidden for already.
--
-- Tasks are found by their message, then by their key, and their status is judged afterwards: with it among the
-- conditions of a table, stale statistics would let the planner walk through all queued tasks for each one. The same goes
-- for runs and steps: no index can serve "is not distinct from".
create or replace function pgflow_otp._claim_tasks(
  p_flow_slug text, p_queue_name text, p_step_slug text, p_message_ids bigint[], p_worker_id uuid,
  p_margin int, p_hidden_for int
) returns table (
  run_id uuid, step_slug text, task_index int, message_id bigint, attempt int, max_attempts int,
  started_at timestamptz, timeout int, input jsonb, flow_input jsonb
)
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_run_ids uuid[];
  v_step_slugs text[];
  v_task_indexes int[];
  v_message_ids bigint[];
  v_attempts int[];
  v_started_ats timestamptz[];
  v_extend bigint[];
  v_offsets int[];
  v_extended int;
begin
  with held as materialized (
    select t.run_id, t.step_slug, t.task_index, t.status
    from pgflow.step_tasks t
    where t.queue_name = p_queue_name and t.message_id = any (p_message_ids)
    for update skip locked
  ), claimed as (
    update pgflow.step_tasks t
    set status = 'started',
        attempts_count = t.attempts_count + 1,
        started_at = greatest(now(), t.queued_at),
        last_worker_id = p_worker_id
    from held h
    join pgflow.runs r on r.run_id = h.run_id
      and r.status is not distinct from 'started' and r.flow_slug is not distinct from p_flow_slug
    join pgflow.step_states ss on ss.run_id = h.run_id and ss.step_slug = h.step_slug
      and ss.status is not distinct from 'started'
    where t.run_id = h.run_id and t.step_slug = h.step_slug and t.task_index = h.task_index
      and h.status = 'queued'
      and (p_step_slug is null or h.step_slug = p_step_slug)
    returning t.run_id, t.step_slug, t.task_index, t.message_id, t.attempts_count, t.started_at
  ), hidden as (
    select c.*, coalesce(st.opt_timeout, f.opt_timeout) + p_margin as seconds
    from claimed c
    join pgflow.steps st on st.flow_slug = p_flow_slug and st.step_slug = c.step_slug
    join pgflow.flows f on f.flow_slug = p_flow_slug
    order by c.message_id
  )
  select
    array_agg(h.run_id), array_agg(h.step_slug), array_agg(h.task_index), array_agg(h.message_id),
    array_agg(h.attempts_count), array_agg(h.started_at),
    array_agg(h.message_id) filter (where h.seconds is distinct from p_hidden_for),
    array_agg(h.seconds) filter (where h.seconds is distinct from p_hidden_for)
  into v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts, v_started_ats, v_extend, v_offsets
  from hidden h;
  if v_message_ids is null then
    return;
  end if;

  if v_extend is not null then
    select count(*) into v_extended from pgflow.set_vt_batch(p_queue_name, v_extend, v_offsets);
    if v_extended <> cardinality(v_extend) then
      raise invalid_text_representation using message = format(
        'invalid input syntax for type integer: "start_tasks(): visibility updated %s of %s claimed messages"',
        v_extended, cardinality(v_extend));
    end if;
  end if;

  return query
  select c.run_id, c.step_slug, c.task_index, c.message_id, c.attempt,
    coalesce(st.opt_max_attempts, f.opt_max_attempts), c.started_at, coalesce(st.opt_timeout, f.opt_timeout),
    case
      when st.step_type = 'map' then pgflow_otp._map_item(c.run_id, c.step_slug, c.task_index)
      when st.deps_count = 0 then '{}'::jsonb
      else (
        select coalesce(jsonb_object_agg(ds.step_slug, coalesce(ds.output, 'null'::jsonb)), '{}'::jsonb)
        from pgflow.deps d
        join pgflow.step_states ds on ds.run_id = c.run_id and ds.step_slug = d.dep_slug
        where d.flow_slug = p_flow_slug and d.step_slug = c.step_slug and ds.status = 'completed'
      )
    end,
    case when st.step_type = 'single' and st.deps_count = 0 then (select r.input from pgflow.runs r where r.run_id = c.run_id) end
  from unnest(v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts, v_started_ats)
    as c(run_id, step_slug, task_index, message_id, attempt, started_at)
  join pgflow.steps st on st.flow_slug = p_flow_slug and st.step_slug = c.step_slug
  join pgflow.flows f on f.flow_slug = p_flow_slug;
end
$$;

-- Read messages and claim their tasks in one trip. The worker's row is held FOR KEY SHARE and a stopped worker claims
-- nothing: release_worker takes that row FOR UPDATE first, so that a claim which a killed worker left in flight cannot
-- slip in behind the release. Messages are read by the time they become visible, oldest first, and SKIP LOCKED, so that
-- neither a backlog nor messages that wait for their time slow the reading down. A message read in vain becomes visible
-- again after p_visibility seconds; at once, when only its task was held by somebody.
create or replace function pgflow_otp.claim_tasks(
  p_flow_slug text, p_queue_name text, p_worker_id uuid, p_visibility int, p_quantity int, p_kill_grace int default 0
) returns table (
  run_id uuid, step_slug text, task_index int, attempt int, max_attempts int, started_at timestamptz, timeout int,
  input jsonb, flow_input jsonb
)
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_margin constant int := p_kill_grace + 2;
  v_hidden_for int;
  v_message_ids bigint[];
  v_claimed bigint[] := '{}';
  v_in_vain bigint[];
  v_offsets int[];
  v_task record;
begin
  perform from pgflow.workers w
  where w.worker_id = p_worker_id and w.stopped_at is null and w.deprecated_at is null
  for key share;
  if not found then
    return;
  end if;

  -- Read with the visibility that most claims need: the others are corrected after.
  select max(coalesce(st.opt_timeout, f.opt_timeout)) + v_margin into v_hidden_for
  from pgflow.flows f
  left join pgflow.steps st on st.flow_slug = f.flow_slug and st.queue_name = p_queue_name
  where f.flow_slug = p_flow_slug;
  if v_hidden_for is null then
    return;
  end if;
  execute format(
    'with due as materialized ('
    '  select m.msg_id from pgmq.%1$I m where m.vt <= $3 order by m.vt limit $1 for update skip locked'
    '), read as ('
    '  update pgmq.%1$I m set vt = clock_timestamp() + make_interval(secs => $2), read_ct = m.read_ct + 1'
    '  from due where m.msg_id = due.msg_id returning m.msg_id'
    ') select array_agg(read.msg_id) from read',
    pgmq.format_table_name(p_queue_name, 'q'))
  into v_message_ids
  using greatest(p_quantity, 0), v_hidden_for, clock_timestamp();
  if v_message_ids is null then
    return;
  end if;

  for v_task in
    select c.*
    from pgflow_otp._claim_tasks(
      p_flow_slug, p_queue_name, null, v_message_ids, p_worker_id, v_margin, v_hidden_for) c
  loop
    v_claimed := array_append(v_claimed, v_task.message_id);
    run_id := v_task.run_id;
    step_slug := v_task.step_slug;
    task_index := v_task.task_index;
    attempt := v_task.attempt;
    max_attempts := v_task.max_attempts;
    started_at := v_task.started_at;
    timeout := v_task.timeout;
    input := v_task.input;
    flow_input := v_task.flow_input;
    return next;
  end loop;

  if cardinality(v_claimed) < cardinality(v_message_ids) then
    select array_agg(m.id), array_agg(case when t.status = 'queued' then 0 else p_visibility end)
    into v_in_vain, v_offsets
    from unnest(v_message_ids) as m(id)
    left join pgflow.step_tasks t on t.queue_name = p_queue_name and t.message_id = m.id
    where m.id <> all (v_claimed);
    perform pgflow.set_vt_batch(p_queue_name, v_in_vain, v_offsets);
  end if;
end
$$;
