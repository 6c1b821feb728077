-- Tasks whose worker never came back with an answer.

create or replace function pgflow.requeue_stalled_tasks() returns int
language plpgsql volatile security definer set search_path to '' as $$
begin
  return (select s.requeued from pgflow_otp.requeue_stalled(30) s);
end
$$;

create or replace function pgflow.track_worker_function(function_name text, start_mode text default 'http') returns void
language sql volatile as $$
  insert into pgflow.worker_functions as w (function_name, start_mode)
  values (track_worker_function.function_name, track_worker_function.start_mode)
  on conflict on constraint worker_functions_pkey
  do update set start_mode = excluded.start_mode, updated_at = clock_timestamp()
$$;

create or replace function pgflow.mark_worker_stopped(worker_id uuid) returns void
language sql volatile as $$
  update pgflow.workers w set stopped_at = clock_timestamp() where w.worker_id = mark_worker_stopped.worker_id
$$;

-- With pg_cron, recovery may be left to the database. The functions that need it exist only where it does.
do $do$
begin
  if to_regclass('cron.job') is null then
    return;
  end if;
  create or replace function pgflow.setup_requeue_stalled_tasks_cron(cron_interval text default '15 seconds')
  returns text
  language plpgsql volatile security definer set search_path to pgflow, cron, pg_temp as $$
  declare
    v_job_id bigint;
  begin
    perform cron.unschedule(j.jobid) from cron.job j where j.jobname = 'pgflow_requeue_stalled_tasks';
    v_job_id := cron.schedule(
      'pgflow_requeue_stalled_tasks', setup_requeue_stalled_tasks_cron.cron_interval,
      'select pgflow.requeue_stalled_tasks()');
    return format(
      'Scheduled pgflow_requeue_stalled_tasks (every %s, job_id=%s)',
      setup_requeue_stalled_tasks_cron.cron_interval, v_job_id);
  end
  $$;

  create or replace function pgflow.cleanup_ensure_workers_logs(retention_hours int default 24)
  returns table (cron_deleted bigint)
  language sql volatile security definer set search_path to pgflow, cron, pg_temp as $$
    with deleted as (
      delete from cron.job_run_details d
      where d.end_time < now() - make_interval(hours => cleanup_ensure_workers_logs.retention_hours)
      returning 1
    )
    select count(*) from deleted
  $$;
end
$do$;
