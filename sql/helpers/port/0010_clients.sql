-- Functions that the sibling runtimes' clients expect in schema pgflow beside the core.

create or replace function pgflow.get_flow_input(p_run_id uuid) returns jsonb
language sql stable set search_path to '' as $$
  select r.input from pgflow.runs r where r.run_id = p_run_id
$$;

create or replace function pgflow.flow_exists(p_flow_slug text) returns boolean
language sql stable set search_path to '' as $$
  select exists (select from pgflow.flows f where f.flow_slug = p_flow_slug)
$$;

create or replace function pgflow.get_step_output(p_run_id uuid, p_step_slug text) returns jsonb
language sql stable set search_path to '' as $$
  select ss.output from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug
$$;

-- Repeating it only refreshes the heartbeat: a worker that was stopped or deprecated stays so.
create or replace function pgflow.register_worker(p_worker_id uuid, p_queue_name text, p_function_name text) returns void
language sql volatile set search_path to '' as $$
  insert into pgflow.workers (worker_id, queue_name, function_name, started_at, last_heartbeat_at)
  values (p_worker_id, p_queue_name, p_function_name, now(), now())
  on conflict on constraint workers_pkey do update set last_heartbeat_at = now()
$$;

create or replace function pgflow.recover_stalled_tasks(p_stale_threshold double precision)
returns table (recovered_count bigint, vt_batches bigint)
language plpgsql volatile security definer set search_path to '' as $$
begin
  return query
  select s.requeued::bigint, s.made_visible from pgflow_otp.requeue_stalled(p_stale_threshold) s;
end
$$;

create or replace function pgflow.escalate_permanently_stalled() returns int
language plpgsql volatile set search_path to '' as $$
begin
  return pgflow_otp.escalate_stalled();
end
$$;

create or replace view pgflow.step_progress as
select run_id, flow_slug, step_slug, status, total_tasks, completed_tasks, failed_tasks, queued_tasks, started_tasks
from pgflow_otp.step_progress;

create or replace view pgflow.extensions_version as select null::text as placeholder;
