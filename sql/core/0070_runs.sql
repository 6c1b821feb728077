-- Starting runs and reading them back.

create function pgflow.start_flow(flow_slug text, input jsonb, run_id uuid default null) returns setof pgflow.runs
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_items int;
begin
  if exists (
    select from pgflow.steps st
    where st.flow_slug = start_flow.flow_slug and st.step_type = 'map' and st.deps_count = 0
  ) then
    if start_flow.input is null then
      raise exception 'Flow % has root map steps but input is NULL', start_flow.flow_slug;
    elsif jsonb_typeof(start_flow.input) <> 'array' then
      raise exception 'Flow % has root map steps but input is not an array (got %)',
        start_flow.flow_slug, jsonb_typeof(start_flow.input);
    end if;
    v_items := jsonb_array_length(start_flow.input);
  end if;

  insert into pgflow.runs (run_id, flow_slug, input, remaining_steps)
  values (
    coalesce(start_flow.run_id, gen_random_uuid()), start_flow.flow_slug, start_flow.input,
    (select count(*) from pgflow.steps st where st.flow_slug = start_flow.flow_slug))
  returning * into v_run;

  insert into pgflow.step_states (flow_slug, run_id, step_slug, remaining_deps, initial_tasks)
  select st.flow_slug, v_run.run_id, st.step_slug, st.deps_count,
    case
      when st.step_type = 'single' then 1
      when st.deps_count = 0 then v_items
    end
  from pgflow.steps st
  where st.flow_slug = start_flow.flow_slug;

  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:started', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug, 'status', 'started',
      'input', v_run.input, 'remaining_steps', v_run.remaining_steps, 'started_at', v_run.started_at),
    'run:started', 'pgflow:run:' || v_run.run_id, false);

  if pgflow_otp._settle_cascades(v_run.run_id) then
    perform pgflow.start_ready_steps(v_run.run_id);
    perform pgflow.maybe_complete_run(v_run.run_id);
  end if;
  return query select * from pgflow.runs r where r.run_id = v_run.run_id;
end
$$;

create function pgflow.get_run_with_states(run_id uuid) returns jsonb
language sql volatile security definer as $$
  select jsonb_build_object(
    'run', to_jsonb(r),
    'steps', coalesce(
      (select jsonb_agg(to_jsonb(ss)) from pgflow.step_states ss where ss.run_id = r.run_id),
      '[]'::jsonb))
  from pgflow.runs r
  where r.run_id = get_run_with_states.run_id
$$;

create function pgflow.start_flow_with_states(flow_slug text, input jsonb, run_id uuid default null) returns jsonb
language plpgsql volatile security definer as $$
declare
  v_run_id uuid;
begin
  select r.run_id into v_run_id
  from pgflow.start_flow(
    start_flow_with_states.flow_slug, start_flow_with_states.input, start_flow_with_states.run_id) r;
  return pgflow.get_run_with_states(v_run_id);
end
$$;
