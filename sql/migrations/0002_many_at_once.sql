-- Version 2: claims, settles and starts of many at once, elements of maps beside their tasks, runs cancelled and retried.
-- Compatible: workers of version 1 must be stopped for it, but nothing that other runtimes call changes.

alter table pgflow_otp.migrations
  add column breaking boolean not null default false,
  add column owns_core boolean not null default true;

create table pgflow_otp.map_items (
  run_id uuid not null,
  step_slug text not null,
  task_index int not null,
  item jsonb not null,
  constraint map_items_pkey primary key (run_id, step_slug, task_index)
);

create table pgflow_otp.run_actions (
  run_id uuid not null,
  action text not null,
  reason text,
  done_by text not null default current_user,
  done_at timestamptz not null default now(),
  constraint action_is_valid check (action in ('cancelled', 'retried'))
);
create index idx_run_actions_run_id on pgflow_otp.run_actions (run_id);

-- Functions that are gone, or have other arguments now. The rest is replaced in place and keeps its grants.
drop function pgflow_otp.claim_tasks(text, text, uuid, int, int);
drop function pgflow_otp._requeue_stalled(double precision);
drop function pgflow_otp._fail_type_violation(pgflow.runs, text, int, jsonb, text);

-- The same checks in fewer words: each statement that writes to a table reads all of them again.
do $$
declare
  v_check record;
begin
  for v_check in
    select *
    from (values
      ('runs', 'completed_at_or_failed_at', 'completed_at is null or failed_at is null'),
      ('runs', 'completed_at_is_after_started_at', 'completed_at >= started_at'),
      ('runs', 'failed_at_is_after_started_at', 'failed_at >= started_at'),
      ('step_states', 'remaining_tasks_state_consistency',
        'remaining_tasks is null or status <> all (''{created,skipped}'')'),
      ('step_states', 'step_states_initial_tasks_check', 'initial_tasks >= 0'),
      ('step_states', 'started_at_is_after_created_at', 'started_at >= created_at'),
      ('step_states', 'completed_at_is_after_started_at', 'completed_at >= started_at'),
      ('step_states', 'failed_at_is_after_started_at', 'failed_at >= started_at'),
      ('step_states', 'skipped_at_is_after_created_at', 'skipped_at >= created_at'),
      ('step_tasks', 'output_valid_only_for_completed', 'output is null or status = any (''{completed,failed}'')'),
      ('step_tasks', 'completed_at_or_failed_at', 'completed_at is null or failed_at is null'),
      ('step_tasks', 'completed_at_is_after_queued_at', 'completed_at >= queued_at'),
      ('step_tasks', 'failed_at_is_after_queued_at', 'failed_at >= queued_at'),
      ('step_tasks', 'started_at_is_after_queued_at', 'started_at >= queued_at'),
      ('step_tasks', 'completed_at_is_after_started_at', 'completed_at >= started_at'),
      ('step_tasks', 'failed_at_is_after_started_at', 'failed_at >= started_at'),
      ('step_tasks', 'queue_name_is_valid',
        'queue_name <> '''' and length(queue_name) <= 47 and queue_name = lower(queue_name)')
    ) as c(table_name, name, condition)
  loop
    execute format(
      'alter table pgflow.%1$I drop constraint %2$I, add constraint %2$I check (%3$s)',
      v_check.table_name, v_check.name, v_check.condition);
  end loop;
end
$$;
