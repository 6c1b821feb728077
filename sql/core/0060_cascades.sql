-- What follows by itself once a step has ended: conditions, skips, steps without tasks, the end of the run.
-- All of it runs under the lock of the run's row, taken by the caller.

-- Skip a step and everything that depends on it. Parents are skipped and announced before their children: a step can
-- only depend on steps declared before it, so the order of definition is such an order.
create or replace function pgflow._cascade_force_skip_steps(run_id uuid, step_slug text, skip_reason text) returns int
language plpgsql volatile as $$
declare
  v_flow_slug text;
  v_skipped text[];
  v_step record;
begin
  select r.flow_slug into v_flow_slug
  from pgflow.runs r
  where r.run_id = _cascade_force_skip_steps.run_id;
  if not found then
    raise exception 'Run not found: %', _cascade_force_skip_steps.run_id;
  end if;

  with recursive affected (slug) as (
    select _cascade_force_skip_steps.step_slug
    union
    select d.step_slug
    from affected a
    join pgflow.deps d on d.flow_slug = v_flow_slug and d.dep_slug = a.slug
  ), skipped as (
    update pgflow.step_states ss
    set status = 'skipped',
        skip_reason = case
          when ss.step_slug = _cascade_force_skip_steps.step_slug then _cascade_force_skip_steps.skip_reason
          else 'dependency_skipped'
        end,
        skipped_at = now(),
        remaining_tasks = null
    from affected a
    where ss.run_id = _cascade_force_skip_steps.run_id
      and ss.step_slug = a.slug
      and ss.status in ('created', 'started')
    returning ss.step_slug
  )
  select coalesce(array_agg(s.step_slug order by st.step_index), '{}')
  into v_skipped
  from skipped s
  join pgflow.steps st on st.flow_slug = v_flow_slug and st.step_slug = s.step_slug;

  if v_skipped = '{}' then
    return 0;
  end if;

  for v_step in
    select ss.step_slug, ss.skip_reason, ss.skipped_at
    from unnest(v_skipped) with ordinality as k(slug, place)
    join pgflow.step_states ss on ss.run_id = _cascade_force_skip_steps.run_id and ss.step_slug = k.slug
    order by k.place
  loop
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'step:skipped', 'run_id', _cascade_force_skip_steps.run_id, 'flow_slug', v_flow_slug,
        'step_slug', v_step.step_slug, 'status', 'skipped', 'skip_reason', v_step.skip_reason,
        'skipped_at', v_step.skipped_at),
      'step:' || v_step.step_slug || ':skipped', 'pgflow:run:' || _cascade_force_skip_steps.run_id, false);
  end loop;

  perform pgflow_otp._end_open_tasks(_cascade_force_skip_steps.run_id, v_skipped, 'skipped');

  update pgflow.runs r
  set remaining_steps = r.remaining_steps - cardinality(v_skipped)
  where r.run_id = _cascade_force_skip_steps.run_id;
  return cardinality(v_skipped);
end
$$;

-- Judge the conditions of all ready steps. False when the run is failed, or fails because of one.
create or replace function pgflow.cascade_resolve_conditions(run_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_round int := 0;
  v_fail text[];
  v_skip text[];
  v_cascade text[];
  v_slug text;
begin
  select * into v_run from pgflow.runs r where r.run_id = cascade_resolve_conditions.run_id;
  if not found or v_run.status = 'completed' then
    return true;
  elsif v_run.status = 'failed' then
    return false;
  end if;

  loop
    v_round := v_round + 1;
    if v_round > 50 then
      raise exception 'cascade_resolve_conditions exceeded safety limit of 50 iterations';
    end if;

    select
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'fail'),
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'skip'),
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'skip-cascade')
    into v_fail, v_skip, v_cascade
    from pgflow_otp._unmet_conditions(cascade_resolve_conditions.run_id) u;

    if v_fail is not null then
      update pgflow.runs r
      set status = 'failed', failed_at = now()
      where r.run_id = cascade_resolve_conditions.run_id and r.status = 'started';
      if found then
        update pgflow.step_states ss
        set status = 'failed', failed_at = now(), error_message = 'Condition not met'
        where ss.run_id = cascade_resolve_conditions.run_id and ss.step_slug = v_fail[1];
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'step:failed', 'run_id', v_run.run_id, 'step_slug', v_fail[1], 'status', 'failed',
            'error_message', 'Condition not met', 'failed_at', now()),
          'step:' || v_fail[1] || ':failed', 'pgflow:run:' || v_run.run_id, false);
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'run:failed', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug, 'status', 'failed',
            'error_message', 'Condition not met', 'failed_at', now()),
          'run:failed', 'pgflow:run:' || v_run.run_id, false);
        perform pgflow_otp._end_open_tasks(v_run.run_id, null, 'cancelled');
      end if;
      return false;
    end if;

    if v_skip is not null then
      update pgflow.step_states ss
      set status = 'skipped', skip_reason = 'condition_unmet', skipped_at = now()
      where ss.run_id = cascade_resolve_conditions.run_id and ss.step_slug = any (v_skip);
      foreach v_slug in array v_skip loop
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'step:skipped', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug,
            'step_slug', v_slug, 'status', 'skipped', 'skip_reason', 'condition_unmet', 'skipped_at', now()),
          'step:' || v_slug || ':skipped', 'pgflow:run:' || v_run.run_id, false);
      end loop;
      perform pgflow_otp._release_children_of_skipped(v_run.run_id, v_run.flow_slug, v_skip);
      update pgflow.runs r
      set remaining_steps = r.remaining_steps - cardinality(v_skip)
      where r.run_id = v_run.run_id;
    end if;

    foreach v_slug in array coalesce(v_cascade, '{}') loop
      perform pgflow._cascade_force_skip_steps(v_run.run_id, v_slug, 'condition_unmet');
    end loop;

    select r.status into v_run.status from pgflow.runs r where r.run_id = v_run.run_id;
    if v_run.status <> 'started' then
      return v_run.status <> 'failed';
    end if;
    exit when v_skip is null;
  end loop;
  return true;
end
$$;

-- Complete the ready steps that have nothing to do, and what becomes ready and empty by that.
-- A step whose condition is unmet is left for cascade_resolve_conditions.
create or replace function pgflow.cascade_complete_taskless_steps(run_id uuid) returns int
language plpgsql volatile as $$
declare
  v_flow_slug text;
  v_round int := 0;
  v_total int := 0;
  v_completed text[];
  v_step record;
begin
  loop
    v_round := v_round + 1;
    if v_round > 50 then
      raise exception 'Cascade loop exceeded safety limit of 50 iterations';
    end if;

    with completed as (
      update pgflow.step_states ss
      set status = 'completed', started_at = now(), completed_at = now(), remaining_tasks = 0,
          output = case when st.step_type = 'map' then '[]'::jsonb end
      from pgflow.steps st
      where ss.run_id = cascade_complete_taskless_steps.run_id
        and st.flow_slug = ss.flow_slug
        and st.step_slug = ss.step_slug
        and ss.status = 'created'
        and ss.remaining_deps = 0
        and ss.initial_tasks = 0
        and (
          (st.required_input_pattern is null and st.forbidden_input_pattern is null)
          or not exists (
            select from pgflow_otp._unmet_conditions(cascade_complete_taskless_steps.run_id) u
            where u.step_slug = ss.step_slug
          )
        )
      returning ss.flow_slug, ss.step_slug, st.step_index
    )
    select array_agg(c.step_slug order by c.step_index), min(c.flow_slug)
    into v_completed, v_flow_slug
    from completed c;
    exit when v_completed is null;

    for v_step in
      select ss.*
      from unnest(v_completed) with ordinality as k(slug, place)
      join pgflow.step_states ss on ss.run_id = cascade_complete_taskless_steps.run_id and ss.step_slug = k.slug
      order by k.place
    loop
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:completed', 'run_id', v_step.run_id, 'step_slug', v_step.step_slug,
          'status', 'completed', 'started_at', v_step.started_at, 'completed_at', v_step.completed_at,
          'remaining_tasks', 0, 'remaining_deps', 0, 'output', v_step.output),
        'step:' || v_step.step_slug || ':completed', 'pgflow:run:' || v_step.run_id, false);
    end loop;

    update pgflow.step_states cs
    set remaining_deps = cs.remaining_deps - c.parents,
        initial_tasks = case when c.step_type = 'map' then 0 else cs.initial_tasks end
    from (
      select d.step_slug, count(*)::int as parents, st.step_type
      from pgflow.deps d
      join pgflow.steps st on st.flow_slug = d.flow_slug and st.step_slug = d.step_slug
      where d.flow_slug = v_flow_slug and d.dep_slug = any (v_completed)
      group by d.step_slug, st.step_type
    ) c
    where cs.run_id = cascade_complete_taskless_steps.run_id and cs.step_slug = c.step_slug;

    update pgflow.runs r
    set remaining_steps = r.remaining_steps - cardinality(v_completed)
    where r.run_id = cascade_complete_taskless_steps.run_id;
    v_total := v_total + cardinality(v_completed);
  end loop;
  return v_total;
end
$$;

create or replace function pgflow.maybe_complete_run(run_id uuid) returns void
language plpgsql volatile set search_path to '' as $$
begin
  update pgflow.runs r
  set status = 'completed', completed_at = now(), output = pgflow_otp._run_output(r.run_id, r.flow_slug)
  where r.run_id = maybe_complete_run.run_id
    and r.remaining_steps = 0
    and r.status <> 'completed';
  if found then
    perform pgflow_otp._announce_end(maybe_complete_run.run_id);
  end if;
end
$$;

-- Start every step whose dependencies are settled and that has tasks. Conditions are not looked at here.
create or replace function pgflow.start_ready_steps(run_id uuid) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_run_ids uuid[];
  v_step_slugs text[];
begin
  with ready as materialized (
    select ss.step_slug
    from pgflow.runs r
    join pgflow.step_states ss on ss.run_id = r.run_id
    where r.run_id = start_ready_steps.run_id
      and r.status not in ('failed', 'completed')
      and ss.status = 'created'
      and ss.remaining_deps = 0
      and ss.initial_tasks > 0
    order by ss.step_slug
    for update of ss
  ), started as (
    update pgflow.step_states ss
    set status = 'started', started_at = now(), remaining_tasks = ss.initial_tasks
    from ready
    where ss.run_id = start_ready_steps.run_id and ss.step_slug = ready.step_slug
    returning ss.run_id, ss.step_slug
  )
  select array_agg(s.run_id order by s.step_slug), array_agg(s.step_slug order by s.step_slug)
  into v_run_ids, v_step_slugs
  from started s;
  if v_run_ids is not null then
    perform pgflow_otp._send_tasks(v_run_ids, v_step_slugs);
  end if;
end
$$;
