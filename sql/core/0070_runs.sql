-- Starting runs and reading them back.

create or replace function pgflow.start_flow(flow_slug text, input jsonb, run_id uuid default null)
returns setof pgflow.runs
language plpgsql volatile set search_path to '' as $$
declare
  v_run_id constant uuid := coalesce(start_flow.run_id, gen_random_uuid());
begin
  perform pgflow_otp._start_runs(start_flow.flow_slug, array[start_flow.input], array[v_run_id]);
  return query select * from pgflow.runs r where r.run_id = v_run_id;
end
$$;

create or replace function pgflow.get_run_with_states(run_id uuid) returns jsonb
language sql volatile security definer as $$
  select jsonb_build_object(
    'run', to_jsonb(r),
    'steps', coalesce(
      (select jsonb_agg(to_jsonb(ss)) from pgflow.step_states ss where ss.run_id = r.run_id),
      '[]'::jsonb))
  from pgflow.runs r
  where r.run_id = get_run_with_states.run_id
$$;

create or replace function pgflow.start_flow_with_states(flow_slug text, input jsonb, run_id uuid default null) returns jsonb
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
