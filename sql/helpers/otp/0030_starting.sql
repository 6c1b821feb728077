-- Starting runs, one or many.

-- Start one run for each input. Steps that can start at once are stored as started; what needs a decision first
-- (conditions, empty maps) goes through the cascades, run by run. The planner is kept to the indexes and to joins in the
-- order they are written: a plan made while the tables were empty must do when they are large.
create or replace function pgflow_otp._start_runs(p_flow_slug text, p_inputs jsonb[], p_run_ids uuid[]) returns void
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_steps int;
  v_roots text[];
  v_has_root_map boolean;
  v_is_plain boolean;
  v_run_ids uuid[];
  v_slugs text[];
begin
  select
    count(*),
    array_agg(st.step_slug order by st.step_slug) filter (where st.deps_count = 0),
    coalesce(bool_or(st.step_type = 'map' and st.deps_count = 0), false),
    coalesce(bool_and(st.required_input_pattern is null and st.forbidden_input_pattern is null), false)
  into v_steps, v_roots, v_has_root_map, v_is_plain
  from pgflow.steps st
  where st.flow_slug = p_flow_slug;

  if v_has_root_map then
    for i in 1 .. cardinality(p_inputs) loop
      if p_inputs[i] is null then
        raise exception 'Flow % has root map steps but input is NULL', p_flow_slug;
      elsif jsonb_typeof(p_inputs[i]) <> 'array' then
        raise exception 'Flow % has root map steps but input is not an array (got %)',
          p_flow_slug, jsonb_typeof(p_inputs[i]);
      end if;
      v_is_plain := v_is_plain and p_inputs[i] <> '[]';
    end loop;
  end if;

  insert into pgflow.runs (run_id, flow_slug, input, remaining_steps)
  select u.run_id, p_flow_slug, u.input, v_steps
  from unnest(p_run_ids, p_inputs) as u(run_id, input);

  insert into pgflow.step_states (
    flow_slug, run_id, step_slug, remaining_deps, initial_tasks, status, started_at, remaining_tasks)
  select p_flow_slug, u.run_id, st.step_slug, st.deps_count, n.tasks,
    case when n.starts then 'started' else 'created' end,
    case when n.starts then now() end,
    case when n.starts then n.tasks end
  from unnest(p_run_ids, p_inputs) as u(run_id, input)
  cross join pgflow.steps st
  cross join lateral (
    select v_is_plain and st.deps_count = 0 as starts,
      case
        when st.step_type = 'single' then 1
        when st.deps_count = 0 then jsonb_array_length(u.input)
      end as tasks
  ) n
  where st.flow_slug = p_flow_slug;

  for i in 1 .. cardinality(p_run_ids) loop
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'run:started', 'run_id', p_run_ids[i], 'flow_slug', p_flow_slug, 'status', 'started',
        'input', p_inputs[i], 'remaining_steps', v_steps, 'started_at', now()),
      'run:started', 'pgflow:run:' || p_run_ids[i], false);
  end loop;

  if v_is_plain then
    select array_agg(r.run_id order by r.place, s.place), array_agg(s.step_slug order by r.place, s.place)
    into v_run_ids, v_slugs
    from unnest(p_run_ids) with ordinality as r(run_id, place)
    cross join unnest(v_roots) with ordinality as s(step_slug, place);
    perform pgflow_otp._send_tasks(v_run_ids, v_slugs);
  else
    for i in 1 .. cardinality(p_run_ids) loop
      if pgflow_otp._settle_cascades(p_run_ids[i]) then
        perform pgflow.start_ready_steps(p_run_ids[i]);
        perform pgflow.maybe_complete_run(p_run_ids[i]);
      end if;
    end loop;
  end if;
end
$$;

-- Start many runs of a flow in one call and one transaction; returns their ids in the order of the inputs. Each run is
-- started as pgflow.start_flow would. One bad input starts none, and the error's detail gives its position.
create or replace function pgflow_otp.start_flows(p_flow_slug text, p_inputs text[], p_run_ids uuid[] default null)
returns setof uuid
language plpgsql volatile set search_path to '' as $$
declare
  v_inputs jsonb[] := '{}';
  v_run_ids uuid[];
  v_place int := 0;
  v_message text;
  v_state text;
begin
  if p_run_ids is not null and cardinality(p_run_ids) <> cardinality(p_inputs) then
    raise exception using
      errcode = 'invalid_parameter_value',
      message = format('start_flows: %s run ids for %s inputs', cardinality(p_run_ids), cardinality(p_inputs));
  end if;
  if coalesce(cardinality(p_inputs), 0) = 0 then
    return;
  end if;
  begin
    foreach v_message in array p_inputs loop
      v_place := v_place + 1;
      v_inputs := array_append(v_inputs, v_message::jsonb);
    end loop;
  exception when data_exception then
    get stacked diagnostics v_message = message_text, v_state = returned_sqlstate;
    raise exception using errcode = v_state, message = v_message, detail = format('input at position %s', v_place);
  end;
  v_run_ids := array(
    select coalesce(u.run_id, gen_random_uuid())
    from unnest(coalesce(p_run_ids, array_fill(null::uuid, array[cardinality(p_inputs)]))) with ordinality
      as u(run_id, place)
    order by u.place);
  perform pgflow_otp._start_runs(p_flow_slug, v_inputs, v_run_ids);
  return query select unnest(v_run_ids);
end
$$;
