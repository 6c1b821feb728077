-- Functions that the sibling runtimes' clients expect in schema pgflow beside the core.

create function pgflow.get_flow_input(p_run_id uuid) returns jsonb
language sql stable set search_path to '' as $$
  select r.input from pgflow.runs r where r.run_id = p_run_id
$$;

create function pgflow.flow_exists(p_flow_slug text) returns boolean
language sql stable set search_path to '' as $$
  select exists (select from pgflow.flows f where f.flow_slug = p_flow_slug)
$$;

create function pgflow.get_step_output(p_run_id uuid, p_step_slug text) returns jsonb
language sql stable set search_path to '' as $$
  select ss.output from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug
$$;

-- Repeating it only refreshes the heartbeat: a worker that was stopped or deprecated stays so.
create function pgflow.register_worker(p_worker_id uuid, p_queue_name text, p_function_name text) returns void
language sql volatile set search_path to '' as $$
  insert into pgflow.workers (worker_id, queue_name, function_name, started_at, last_heartbeat_at)
  values (p_worker_id, p_queue_name, p_function_name, now(), now())
  on conflict on constraint workers_pkey do update set last_heartbeat_at = now()
$$;

create function pgflow.recover_stalled_tasks(p_stale_threshold double precision)
returns table (recovered_count bigint, vt_batches bigint)
language plpgsql volatile security definer set search_path to '' as $$
begin
  return query
  select s.requeued::bigint, s.made_visible from pgflow_otp._requeue_stalled(p_stale_threshold) s;
end
$$;

-- Fail the tasks that recovery gave up on, as their step's when_exhausted says. Runs in a transaction of its own:
-- recovery locks tasks first, failing locks the run first.
create function pgflow.escalate_permanently_stalled() returns int
language plpgsql volatile set search_path to '' as $$
declare
  v_task record;
  v_escalated int := 0;
begin
  for v_task in
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    where t.status = 'started'
      and t.permanently_stalled_at is not null
      and r.status = 'started'
      and ss.status = 'started'
    order by t.run_id, t.step_slug, t.task_index
  loop
    if pgflow_otp._fail_for_good(
      v_task.run_id, v_task.step_slug, v_task.task_index,
      format('Task stalled: no answer from its worker, requeued %s times', v_task.requeued_count)) = 'failed'
    then
      v_escalated := v_escalated + 1;
    end if;
  end loop;
  return v_escalated;
end
$$;

create view pgflow.step_progress as
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

create view pgflow.extensions_version as select null::text as placeholder;
