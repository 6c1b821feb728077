-- Definitions, runs and workers. States are text with a CHECK: other runtimes read them as such, and compare
-- constraint names, so none of them may be renamed. The checks are put as briefly as they can be (a comparison with NULL
-- passes): all of a table's are read again by each statement that writes to it, and that is most of what it costs.

create type pgflow.step_task_record as (
  flow_slug text,
  run_id uuid,
  step_slug text,
  input jsonb,
  msg_id bigint,
  task_index int,
  flow_input jsonb,
  attempts_count int
);

create table pgflow.flows (
  flow_slug text not null,
  opt_max_attempts int not null default 3,
  opt_base_delay int not null default 1,
  opt_timeout int not null default 60,
  created_at timestamptz not null default now(),
  queue_mode text not null default 'flow',
  flow_type text not null default 'flow',
  constraint flows_pkey primary key (flow_slug),
  constraint slug_is_valid check (pgflow.is_valid_slug(flow_slug)),
  constraint opt_max_attempts_is_nonnegative check (opt_max_attempts >= 0),
  constraint opt_base_delay_is_nonnegative check (opt_base_delay >= 0),
  constraint opt_timeout_is_positive check (opt_timeout > 0),
  constraint queue_mode_is_valid check (queue_mode in ('flow', 'step')),
  constraint flow_type_is_valid check (flow_type in ('flow', 'job'))
);
create unique index idx_flows_normalized_slug on pgflow.flows (lower(flow_slug));

create table pgflow.steps (
  flow_slug text not null,
  step_slug text not null,
  step_type text not null default 'single',
  step_index int not null default 0,
  deps_count int not null default 0,
  opt_max_attempts int,
  opt_base_delay int,
  opt_timeout int,
  opt_start_delay int,
  required_input_pattern jsonb,
  forbidden_input_pattern jsonb,
  when_unmet text not null default 'skip',
  when_exhausted text not null default 'fail',
  created_at timestamptz not null default now(),
  queue_name text not null,
  constraint steps_pkey primary key (flow_slug, step_slug),
  constraint steps_flow_slug_step_index_key unique (flow_slug, step_index),
  constraint steps_flow_slug_fkey foreign key (flow_slug) references pgflow.flows (flow_slug),
  constraint steps_step_slug_check check (pgflow.is_valid_slug(step_slug)),
  constraint steps_step_type_check check (step_type in ('single', 'map')),
  constraint steps_deps_count_check check (deps_count >= 0),
  constraint opt_max_attempts_is_nonnegative check (opt_max_attempts is null or opt_max_attempts >= 0),
  constraint opt_base_delay_is_nonnegative check (opt_base_delay is null or opt_base_delay >= 0),
  constraint opt_start_delay_is_nonnegative check (opt_start_delay is null or opt_start_delay >= 0),
  constraint opt_timeout_is_positive check (opt_timeout is null or opt_timeout > 0),
  constraint required_input_pattern_is_object
    check (required_input_pattern is null or jsonb_typeof(required_input_pattern) = 'object'),
  constraint forbidden_input_pattern_is_object
    check (forbidden_input_pattern is null or jsonb_typeof(forbidden_input_pattern) = 'object'),
  constraint when_unmet_is_valid check (when_unmet in ('fail', 'skip', 'skip-cascade')),
  constraint when_exhausted_is_valid check (when_exhausted in ('fail', 'skip', 'skip-cascade')),
  constraint queue_name_is_valid check (pgflow.is_valid_queue_name(queue_name))
);
create unique index idx_steps_normalized_slug on pgflow.steps (flow_slug, lower(step_slug));

create table pgflow.deps (
  flow_slug text not null,
  dep_slug text not null,
  step_slug text not null,
  created_at timestamptz not null default now(),
  constraint deps_pkey primary key (flow_slug, dep_slug, step_slug),
  constraint deps_flow_slug_fkey foreign key (flow_slug) references pgflow.flows (flow_slug),
  constraint deps_flow_slug_dep_slug_fkey
    foreign key (flow_slug, dep_slug) references pgflow.steps (flow_slug, step_slug),
  constraint deps_flow_slug_step_slug_fkey
    foreign key (flow_slug, step_slug) references pgflow.steps (flow_slug, step_slug),
  constraint deps_check check (dep_slug <> step_slug)
);
create index idx_deps_by_flow_step on pgflow.deps (flow_slug, step_slug);
create index idx_deps_by_flow_dep on pgflow.deps (flow_slug, dep_slug);

create table pgflow.workers (
  worker_id uuid not null,
  queue_name text not null,
  function_name text not null,
  started_at timestamptz not null default now(),
  deprecated_at timestamptz,
  stopped_at timestamptz,
  last_heartbeat_at timestamptz not null default now(),
  pgflow_version text,
  constraint workers_pkey primary key (worker_id)
);
create index idx_workers_queue_name on pgflow.workers (queue_name);
create index idx_workers_heartbeat on pgflow.workers (last_heartbeat_at);
create index idx_workers_started_at on pgflow.workers (started_at);
create index idx_workers_stopped_at on pgflow.workers (stopped_at);

create table pgflow.worker_functions (
  function_name text not null,
  enabled boolean not null default true,
  debounce interval not null default '6 seconds',
  last_invoked_at timestamptz,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  start_mode text not null default 'http',
  constraint worker_functions_pkey primary key (function_name),
  constraint worker_functions_debounce_check check (debounce >= interval '1 second'),
  constraint worker_functions_start_mode_check check (start_mode in ('http', 'process'))
);

create table pgflow.runs (
  run_id uuid not null default gen_random_uuid(),
  flow_slug text not null,
  status text not null default 'started',
  input jsonb not null,
  output jsonb,
  remaining_steps int not null default 0,
  started_at timestamptz not null default now(),
  completed_at timestamptz,
  failed_at timestamptz,
  constraint runs_pkey primary key (run_id),
  constraint runs_flow_slug_fkey foreign key (flow_slug) references pgflow.flows (flow_slug),
  constraint status_is_valid check (status in ('started', 'failed', 'completed')),
  constraint runs_remaining_steps_check check (remaining_steps >= 0),
  constraint completed_at_or_failed_at check (completed_at is null or failed_at is null),
  constraint completed_at_is_after_started_at check (completed_at >= started_at),
  constraint failed_at_is_after_started_at check (failed_at >= started_at)
);
create index idx_runs_flow_slug on pgflow.runs (flow_slug);
create index idx_runs_status on pgflow.runs (status);
create index idx_runs_started_at on pgflow.runs (started_at);
create index idx_runs_flow_started on pgflow.runs (flow_slug, started_at desc);

create table pgflow.step_states (
  flow_slug text not null,
  run_id uuid not null,
  step_slug text not null,
  status text not null default 'created',
  remaining_tasks int,
  initial_tasks int,
  remaining_deps int not null default 0,
  output jsonb,
  error_message text,
  skip_reason text,
  created_at timestamptz not null default now(),
  started_at timestamptz,
  completed_at timestamptz,
  failed_at timestamptz,
  skipped_at timestamptz,
  constraint step_states_pkey primary key (run_id, step_slug),
  constraint step_states_flow_slug_fkey foreign key (flow_slug) references pgflow.flows (flow_slug),
  constraint step_states_run_id_fkey foreign key (run_id) references pgflow.runs (run_id),
  constraint step_states_flow_slug_step_slug_fkey
    foreign key (flow_slug, step_slug) references pgflow.steps (flow_slug, step_slug),
  constraint status_is_valid check (status in ('created', 'started', 'completed', 'failed', 'skipped')),
  constraint status_and_remaining_tasks_match check (status <> 'completed' or remaining_tasks = 0),
  constraint remaining_tasks_state_consistency
    check (remaining_tasks is null or status <> all ('{created,skipped}')),
  constraint initial_tasks_known_when_started check (status <> 'started' or initial_tasks is not null),
  constraint step_states_initial_tasks_check check (initial_tasks >= 0),
  constraint step_states_remaining_deps_check check (remaining_deps >= 0),
  constraint output_only_for_completed_or_null check (output is null or status = 'completed'),
  constraint skip_reason_matches_status check ((status = 'skipped') = (skip_reason is not null)),
  constraint completed_at_or_failed_at_or_skipped_at
    check (num_nonnulls(completed_at, failed_at, skipped_at) <= 1),
  constraint started_at_is_after_created_at check (started_at >= created_at),
  constraint completed_at_is_after_started_at check (completed_at >= started_at),
  constraint failed_at_is_after_started_at check (failed_at >= started_at),
  constraint skipped_at_is_after_created_at check (skipped_at >= created_at)
);
create index idx_step_states_ready on pgflow.step_states (run_id, status, remaining_deps)
  where status = 'created' and remaining_deps = 0;
create index idx_step_states_failed on pgflow.step_states (run_id, step_slug) where status = 'failed';
create index idx_step_states_skipped on pgflow.step_states (run_id, step_slug) where status = 'skipped';
create index idx_step_states_flow_slug on pgflow.step_states (flow_slug);
create index idx_step_states_run_id on pgflow.step_states (run_id);

-- The position of status (6th) is part of the contract: another runtime reads result rows by position.
create table pgflow.step_tasks (
  flow_slug text not null,
  run_id uuid not null,
  step_slug text not null,
  message_id bigint,
  task_index int not null default 0,
  status text not null default 'queued',
  attempts_count int not null default 0,
  error_message text,
  output jsonb,
  queued_at timestamptz not null default now(),
  started_at timestamptz,
  completed_at timestamptz,
  failed_at timestamptz,
  last_worker_id uuid,
  requeued_count int not null default 0,
  last_requeued_at timestamptz,
  permanently_stalled_at timestamptz,
  queue_name text not null,
  constraint step_tasks_pkey primary key (run_id, step_slug, task_index),
  constraint step_tasks_flow_slug_fkey foreign key (flow_slug) references pgflow.flows (flow_slug),
  constraint step_tasks_run_id_fkey foreign key (run_id) references pgflow.runs (run_id),
  constraint step_tasks_run_id_step_slug_fkey
    foreign key (run_id, step_slug) references pgflow.step_states (run_id, step_slug),
  constraint step_tasks_last_worker_id_fkey
    foreign key (last_worker_id) references pgflow.workers (worker_id) on delete set null,
  constraint valid_status
    check (status in ('queued', 'started', 'completed', 'failed', 'skipped', 'cancelled')),
  constraint output_valid_only_for_completed check (output is null or status = any ('{completed,failed}')),
  constraint attempts_count_nonnegative check (attempts_count >= 0),
  constraint completed_at_or_failed_at check (completed_at is null or failed_at is null),
  constraint completed_at_is_after_queued_at check (completed_at >= queued_at),
  constraint failed_at_is_after_queued_at check (failed_at >= queued_at),
  constraint started_at_is_after_queued_at check (started_at >= queued_at),
  constraint completed_at_is_after_started_at check (completed_at >= started_at),
  constraint failed_at_is_after_started_at check (failed_at >= started_at),
  -- is_valid_queue_name written out: this is judged at each change of a task, and a call would cost more than the rest.
  constraint queue_name_is_valid
    check (queue_name <> '' and length(queue_name) <= 47 and queue_name = lower(queue_name))
);
create unique index idx_step_tasks_queue_message on pgflow.step_tasks (queue_name, message_id)
  where message_id is not null;
create index idx_step_tasks_queued on pgflow.step_tasks (run_id, step_slug) where status = 'queued';
create index idx_step_tasks_completed on pgflow.step_tasks (run_id, step_slug) where status = 'completed';
create index idx_step_tasks_failed on pgflow.step_tasks (run_id, step_slug) where status = 'failed';
create index idx_step_tasks_flow_run_step on pgflow.step_tasks (flow_slug, run_id, step_slug);
create index idx_step_tasks_started on pgflow.step_tasks (started_at) where status = 'started';
create index idx_step_tasks_queued_msg on pgflow.step_tasks (message_id) where status = 'queued';
create index idx_step_tasks_last_worker on pgflow.step_tasks (last_worker_id) where status = 'started';
