-- Removing what is no longer wanted; see pgflow_otp.delete_run and pgflow_otp.prune.

create or replace function pgflow.delete_run(p_run_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
begin
  return pgflow_otp.delete_run(p_run_id);
end
$$;

create or replace function pgflow.prune_data_older_than(p_retention_interval interval, p_flow_slugs text[])
returns table (deleted_runs bigint, deleted_step_states bigint, deleted_step_tasks bigint, deleted_workers bigint)
language plpgsql volatile set search_path to '' as $$
begin
  return query select * from pgflow_otp.prune(p_retention_interval, p_flow_slugs);
end
$$;
