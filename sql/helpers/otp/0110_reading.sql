-- What is asked for without changing anything.

create or replace function pgflow_otp.flow_exists(p_flow_slug text) returns boolean
language sql stable set search_path to '' as $$
  select exists (select from pgflow.flows f where f.flow_slug = p_flow_slug)
$$;

create or replace function pgflow_otp.get_flow_input(p_run_id uuid) returns jsonb
language sql stable set search_path to '' as $$
  select r.input from pgflow.runs r where r.run_id = p_run_id
$$;

create or replace view pgflow_otp.step_progress as
select
  ss.run_id,
  ss.flow_slug,
  ss.step_slug,
  ss.status,
  coalesce(ss.initial_tasks, 0)::bigint as total_tasks,
  count(t.status) filter (where t.status = 'completed') as completed_tasks,
  count(t.status) filter (where t.status = 'failed') as failed_tasks,
  count(t.status) filter (where t.status = 'queued') as queued_tasks,
  count(t.status) filter (where t.status = 'started') as started_tasks
from pgflow.step_states ss
left join pgflow.step_tasks t on t.run_id = ss.run_id and t.step_slug = ss.step_slug
group by ss.run_id, ss.step_slug;
