-- The two schemas, and the function that events are sent through.
--
-- pgflow holds what every runtime shares (tables, functions, literal texts); pgflow_otp holds what only this
-- runtime adds. Private helpers of the core also live in pgflow_otp, so that pgflow never has a name of ours.
create schema pgflow;
create schema if not exists pgflow_otp;
revoke all on schema pgflow from public;
-- The core's functions run with their caller's rights and call private ones here: whoever is granted pgflow has to
-- reach them. They can do nothing that the caller could not.
grant usage on schema pgflow_otp to public;

-- On Supabase realtime.send broadcasts to browsers. Elsewhere a function that does nothing stands in for it,
-- and an existing one is never replaced.
do $$
begin
  if to_regprocedure('realtime.send(jsonb,text,text,boolean)') is null then
    create schema if not exists realtime;
    create function realtime.send(payload jsonb, event text, topic text, private boolean default false)
    returns void language sql as 'select null::void';
  end if;
end
$$;
-- Small pure functions that the tables' constraints and everything else build on.

-- True where the database carries the well-known secret of a local Supabase: only there may a changed flow
-- replace the stored one together with its runs.
create function pgflow.is_local() returns boolean
language sql stable parallel safe set search_path to '' as $$
  select coalesce(
    current_setting('app.settings.jwt_secret', true)
      = 'super-secret-jwt-token-with-at-least-32-characters-long',
    false)
$$;

create function pgflow.is_valid_slug(slug text) returns boolean
language plpgsql immutable set search_path to '' as $$
begin
  return slug is not null
    and length(slug) <= 128
    and slug ~ '^[a-zA-Z]([a-zA-Z0-9_]*[a-zA-Z0-9])?$'
    and position('__' in slug) = 0
    and slug <> 'run';
end
$$;

create function pgflow.is_valid_queue_name(queue_name text) returns boolean
language sql immutable set search_path to '' as $$
  select queue_name is not null
    and queue_name <> ''
    and length(queue_name) <= 47
    and queue_name = lower(queue_name)
$$;

-- Seconds until the next attempt; attempts_count is the count after the attempt that failed.
create function pgflow.calculate_retry_delay(base_delay numeric, attempts_count int) returns int
language sql immutable parallel safe set search_path to '' as $$
  select floor(base_delay * power(2::numeric, attempts_count))::int
$$;
-- Definitions, runs and workers. States are text with a CHECK: other runtimes read them as such, and compare
-- constraint names, so none of them may be renamed.

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
  constraint completed_at_or_failed_at check (not (completed_at is not null and failed_at is not null)),
  constraint completed_at_is_after_started_at check (completed_at is null or completed_at >= started_at),
  constraint failed_at_is_after_started_at check (failed_at is null or failed_at >= started_at)
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
    check (remaining_tasks is null or status not in ('created', 'skipped')),
  constraint initial_tasks_known_when_started check (status <> 'started' or initial_tasks is not null),
  constraint step_states_initial_tasks_check check (initial_tasks is null or initial_tasks >= 0),
  constraint step_states_remaining_deps_check check (remaining_deps >= 0),
  constraint output_only_for_completed_or_null check (output is null or status = 'completed'),
  constraint skip_reason_matches_status check ((status = 'skipped') = (skip_reason is not null)),
  constraint completed_at_or_failed_at_or_skipped_at
    check (num_nonnulls(completed_at, failed_at, skipped_at) <= 1),
  constraint started_at_is_after_created_at check (started_at is null or started_at >= created_at),
  constraint completed_at_is_after_started_at check (completed_at is null or completed_at >= started_at),
  constraint failed_at_is_after_started_at check (failed_at is null or failed_at >= started_at),
  constraint skipped_at_is_after_created_at check (skipped_at is null or skipped_at >= created_at)
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
  constraint output_valid_only_for_completed check (output is null or status in ('completed', 'failed')),
  constraint attempts_count_nonnegative check (attempts_count >= 0),
  constraint completed_at_or_failed_at check (not (completed_at is not null and failed_at is not null)),
  constraint completed_at_is_after_queued_at check (completed_at is null or completed_at >= queued_at),
  constraint failed_at_is_after_queued_at check (failed_at is null or failed_at >= queued_at),
  constraint started_at_is_after_queued_at check (started_at is null or started_at >= queued_at),
  constraint completed_at_is_after_started_at
    check (completed_at is null or started_at is null or completed_at >= started_at),
  constraint failed_at_is_after_started_at
    check (failed_at is null or started_at is null or failed_at >= started_at),
  constraint queue_name_is_valid check (pgflow.is_valid_queue_name(queue_name))
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
-- Names of queues and messages of tasks. Only provisioning and deletion may list pgmq's queues; everything at run
-- time goes by the queue_name stored with a step or a task.

-- The spelling under which pgmq lists a queue, which may be older than the lowercase rule.
create function pgflow._listed_queue_name(p_queue_name text) returns text
language plpgsql stable set search_path to '' as $$
declare
  v_spellings text[];
begin
  select array_agg(q.queue_name::text order by q.queue_name::text)
  into v_spellings
  from pgmq.list_queues() q
  where lower(q.queue_name) = lower(p_queue_name);

  if cardinality(v_spellings) > 1 then
    raise exception using
      errcode = 'ambiguous_alias',
      message = format('queue name "%s" is ambiguous: it matches listed queues %s', p_queue_name, v_spellings);
  end if;
  return coalesce(v_spellings[1], p_queue_name);
end
$$;

create function pgflow._archive_task_message(p_run_id uuid, p_step_slug text, p_task_index int) returns void
language sql volatile set search_path to '' as $$
  select pgmq.archive(t.queue_name, t.message_id)
  from pgflow.step_tasks t
  where t.run_id = p_run_id
    and t.step_slug = p_step_slug
    and t.task_index = p_task_index
    and t.message_id is not null
$$;

-- Make messages visible so many seconds from now, each its own number, in one statement.
create function pgflow.set_vt_batch(queue_name text, msg_ids bigint[], vt_offsets int[])
returns table (msg_id bigint, read_ct int, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb)
language plpgsql volatile as $$
begin
  if set_vt_batch.msg_ids is null or set_vt_batch.vt_offsets is null then
    return;
  end if;
  if cardinality(set_vt_batch.msg_ids) <> cardinality(set_vt_batch.vt_offsets) then
    raise exception 'msg_ids length (%) must equal vt_offsets length (%)',
      cardinality(set_vt_batch.msg_ids), cardinality(set_vt_batch.vt_offsets);
  end if;
  return query execute format(
    'update pgmq.%I q
     set vt = clock_timestamp() + make_interval(secs => o.seconds)
     from unnest($1, $2) as o(msg_id, seconds)
     where q.msg_id = o.msg_id
     returning q.msg_id, q.read_ct, q.enqueued_at, q.vt, q.message, q.headers',
    pgmq.format_table_name(set_vt_batch.queue_name, 'q'))
  using set_vt_batch.msg_ids, set_vt_batch.vt_offsets;
end
$$;

-- End every open task of a run (or of some of its steps) and archive their messages, one call per queue.
-- Tasks before messages, and tasks in the order of their key: every path that locks several does so.
create function pgflow_otp._end_open_tasks(p_run_id uuid, p_step_slugs text[], p_status text) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_archived bigint;
begin
  with open as materialized (
    select t.run_id, t.step_slug, t.task_index
    from pgflow.step_tasks t
    where t.run_id = p_run_id
      and (p_step_slugs is null or t.step_slug = any (p_step_slugs))
      and t.status in ('queued', 'started')
    order by t.run_id, t.step_slug, t.task_index
    for update
  ), ended as (
    update pgflow.step_tasks t
    set status = p_status
    from open o
    where t.run_id = o.run_id and t.step_slug = o.step_slug and t.task_index = o.task_index
      and t.status in ('queued', 'started')
    returning t.queue_name, t.message_id
  ), per_queue as (
    select e.queue_name, array_agg(e.message_id) as message_ids
    from ended e
    where e.message_id is not null
    group by e.queue_name
  )
  select count(a.msg_id)
  into v_archived
  from per_queue q
  cross join lateral pgmq.archive(q.queue_name, q.message_ids) as a(msg_id);
end
$$;
-- Declaring flows step by step.

create function pgflow.create_flow(
  flow_slug text, max_attempts int default null, base_delay int default null, timeout int default null
) returns pgflow.flows
language plpgsql volatile set search_path to '' as $$
declare
  v_queue constant text := lower(create_flow.flow_slug);
  v_flow pgflow.flows;
begin
  perform pg_advisory_xact_lock(1, hashtext(v_queue));

  if not exists (select from pgflow.flows f where lower(f.flow_slug) = v_queue)
    and exists (select from pgmq.list_queues() q where lower(q.queue_name) = v_queue)
  then
    raise unique_violation using message = format(
      'cannot create flow "%s": queue "%s" is already in use by another owner', create_flow.flow_slug, v_queue);
  end if;

  insert into pgflow.flows (flow_slug, opt_max_attempts, opt_base_delay, opt_timeout)
  values (
    create_flow.flow_slug,
    coalesce(create_flow.max_attempts, 3),
    coalesce(create_flow.base_delay, 5),
    coalesce(create_flow.timeout, 60))
  on conflict on constraint flows_pkey do nothing
  returning * into v_flow;
  if not found then
    select * into v_flow from pgflow.flows f where f.flow_slug = create_flow.flow_slug;
  end if;

  if v_flow.queue_mode = 'flow'
    and not exists (select from pgmq.list_queues() q where lower(q.queue_name) = v_queue)
  then
    perform pgmq.create(v_queue);
  end if;
  return v_flow;
end
$$;

create function pgflow.add_step(
  flow_slug text,
  step_slug text,
  deps_slugs text[] default '{}',
  max_attempts int default null,
  base_delay int default null,
  timeout int default null,
  start_delay int default null,
  step_type text default 'single',
  required_input_pattern jsonb default null,
  forbidden_input_pattern jsonb default null,
  when_unmet text default 'skip',
  when_exhausted text default 'fail'
) returns pgflow.steps
language plpgsql volatile set search_path to '' as $$
declare
  v_deps text[];
  v_step pgflow.steps;
begin
  perform pg_advisory_xact_lock(1, hashtext(lower(add_step.flow_slug)));

  -- A dependency named twice counts once; otherwise deps_count could never be counted down to zero.
  select coalesce(array_agg(d.slug order by d.first_place), '{}')
  into v_deps
  from (
    select u.slug, min(u.place) as first_place
    from unnest(add_step.deps_slugs) with ordinality as u(slug, place)
    group by u.slug
  ) d;

  if add_step.step_type = 'map' and cardinality(v_deps) > 1 then
    raise exception 'Map step "%" can have at most one dependency, but % were provided: %',
      add_step.step_slug, cardinality(v_deps), array_to_string(v_deps, ', ');
  end if;
  if exists (select from pgflow.flows f where f.flow_slug = add_step.flow_slug and f.queue_mode = 'step') then
    raise exception 'Flow "%" uses per-step queues: steps cannot be added incrementally.', add_step.flow_slug;
  end if;

  insert into pgflow.steps (
    flow_slug, step_slug, step_type, step_index, deps_count,
    opt_max_attempts, opt_base_delay, opt_timeout, opt_start_delay,
    required_input_pattern, forbidden_input_pattern, when_unmet, when_exhausted, queue_name)
  values (
    add_step.flow_slug, add_step.step_slug, coalesce(add_step.step_type, 'single'),
    (select coalesce(max(s.step_index) + 1, 0) from pgflow.steps s where s.flow_slug = add_step.flow_slug),
    cardinality(v_deps),
    add_step.max_attempts, add_step.base_delay, add_step.timeout, add_step.start_delay,
    add_step.required_input_pattern, add_step.forbidden_input_pattern,
    add_step.when_unmet, add_step.when_exhausted, lower(add_step.flow_slug))
  on conflict on constraint steps_pkey do nothing
  returning * into v_step;
  if not found then
    select * into v_step from pgflow.steps s
    where s.flow_slug = add_step.flow_slug and s.step_slug = add_step.step_slug;
  end if;

  insert into pgflow.deps (flow_slug, dep_slug, step_slug)
  select add_step.flow_slug, d.slug, add_step.step_slug
  from unnest(v_deps) as d(slug)
  on conflict on constraint deps_pkey do nothing;

  return v_step;
end
$$;
-- What follows by itself once a step has ended: conditions, skips, steps without tasks, the end of the run.
-- All of it runs under the lock of the run's row, taken by the caller.

-- Steps that are ready, carry a condition, and do not meet it. A root step is judged by the run's input, any other by
-- the object of its completed dependencies (a skipped dependency is absent from it).
create function pgflow_otp._unmet_conditions(p_run_id uuid)
returns table (step_slug text, step_index int, when_unmet text)
language sql stable set search_path to '' as $$
  select st.step_slug, st.step_index, st.when_unmet
  from pgflow.runs r
  join pgflow.steps st on st.flow_slug = r.flow_slug
  join pgflow.step_states ss on ss.run_id = r.run_id and ss.step_slug = st.step_slug
  cross join lateral (
    select case
      when st.deps_count = 0 then r.input
      else (
        select coalesce(jsonb_object_agg(ds.step_slug, coalesce(ds.output, 'null'::jsonb)), '{}'::jsonb)
        from pgflow.deps d
        join pgflow.step_states ds on ds.run_id = r.run_id and ds.step_slug = d.dep_slug
        where d.flow_slug = st.flow_slug and d.step_slug = st.step_slug and ds.status = 'completed'
      )
    end as input
  ) subject
  where r.run_id = p_run_id
    and (st.required_input_pattern is not null or st.forbidden_input_pattern is not null)
    and ss.status = 'created'
    and ss.remaining_deps = 0
    and not (
      (st.required_input_pattern is null or subject.input @> st.required_input_pattern)
      and (st.forbidden_input_pattern is null or not subject.input @> st.forbidden_input_pattern)
    )
$$;

-- Skip a step and everything that depends on it. Parents are skipped and announced before their children: a step can
-- only depend on steps declared before it, so the order of definition is such an order.
create function pgflow._cascade_force_skip_steps(run_id uuid, step_slug text, skip_reason text) returns int
language plpgsql volatile as $$
declare
  v_flow_slug text;
  v_skipped text[];
  v_step record;
begin
  select r.flow_slug into v_flow_slug
  from pgflow.runs r
  where r.run_id = _cascade_force_skip_steps.run_id;
  if not found then
    raise exception 'Run not found: %', _cascade_force_skip_steps.run_id;
  end if;

  with recursive affected (slug) as (
    select _cascade_force_skip_steps.step_slug
    union
    select d.step_slug
    from affected a
    join pgflow.deps d on d.flow_slug = v_flow_slug and d.dep_slug = a.slug
  ), skipped as (
    update pgflow.step_states ss
    set status = 'skipped',
        skip_reason = case
          when ss.step_slug = _cascade_force_skip_steps.step_slug then _cascade_force_skip_steps.skip_reason
          else 'dependency_skipped'
        end,
        skipped_at = now(),
        remaining_tasks = null
    from affected a
    where ss.run_id = _cascade_force_skip_steps.run_id
      and ss.step_slug = a.slug
      and ss.status in ('created', 'started')
    returning ss.step_slug
  )
  select coalesce(array_agg(s.step_slug order by st.step_index), '{}')
  into v_skipped
  from skipped s
  join pgflow.steps st on st.flow_slug = v_flow_slug and st.step_slug = s.step_slug;

  if v_skipped = '{}' then
    return 0;
  end if;

  for v_step in
    select ss.step_slug, ss.skip_reason, ss.skipped_at
    from unnest(v_skipped) with ordinality as k(slug, place)
    join pgflow.step_states ss on ss.run_id = _cascade_force_skip_steps.run_id and ss.step_slug = k.slug
    order by k.place
  loop
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'step:skipped', 'run_id', _cascade_force_skip_steps.run_id, 'flow_slug', v_flow_slug,
        'step_slug', v_step.step_slug, 'status', 'skipped', 'skip_reason', v_step.skip_reason,
        'skipped_at', v_step.skipped_at),
      'step:' || v_step.step_slug || ':skipped', 'pgflow:run:' || _cascade_force_skip_steps.run_id, false);
  end loop;

  perform pgflow_otp._end_open_tasks(_cascade_force_skip_steps.run_id, v_skipped, 'skipped');

  update pgflow.runs r
  set remaining_steps = r.remaining_steps - cardinality(v_skipped)
  where r.run_id = _cascade_force_skip_steps.run_id;
  return cardinality(v_skipped);
end
$$;

-- Judge the conditions of all ready steps. False when the run is failed, or fails because of one.
create function pgflow.cascade_resolve_conditions(run_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_round int := 0;
  v_fail text[];
  v_skip text[];
  v_cascade text[];
  v_slug text;
begin
  select * into v_run from pgflow.runs r where r.run_id = cascade_resolve_conditions.run_id;
  if not found or v_run.status = 'completed' then
    return true;
  elsif v_run.status = 'failed' then
    return false;
  end if;

  loop
    v_round := v_round + 1;
    if v_round > 50 then
      raise exception 'cascade_resolve_conditions exceeded safety limit of 50 iterations';
    end if;

    select
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'fail'),
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'skip'),
      array_agg(u.step_slug order by u.step_index) filter (where u.when_unmet = 'skip-cascade')
    into v_fail, v_skip, v_cascade
    from pgflow_otp._unmet_conditions(cascade_resolve_conditions.run_id) u;

    if v_fail is not null then
      update pgflow.runs r
      set status = 'failed', failed_at = now()
      where r.run_id = cascade_resolve_conditions.run_id and r.status = 'started';
      if found then
        update pgflow.step_states ss
        set status = 'failed', failed_at = now(), error_message = 'Condition not met'
        where ss.run_id = cascade_resolve_conditions.run_id and ss.step_slug = v_fail[1];
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'step:failed', 'run_id', v_run.run_id, 'step_slug', v_fail[1], 'status', 'failed',
            'error_message', 'Condition not met', 'failed_at', now()),
          'step:' || v_fail[1] || ':failed', 'pgflow:run:' || v_run.run_id, false);
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'run:failed', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug, 'status', 'failed',
            'error_message', 'Condition not met', 'failed_at', now()),
          'run:failed', 'pgflow:run:' || v_run.run_id, false);
        perform pgflow_otp._end_open_tasks(v_run.run_id, null, 'cancelled');
      end if;
      return false;
    end if;

    if v_skip is not null then
      update pgflow.step_states ss
      set status = 'skipped', skip_reason = 'condition_unmet', skipped_at = now()
      where ss.run_id = cascade_resolve_conditions.run_id and ss.step_slug = any (v_skip);
      foreach v_slug in array v_skip loop
        perform realtime.send(
          jsonb_build_object(
            'event_type', 'step:skipped', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug,
            'step_slug', v_slug, 'status', 'skipped', 'skip_reason', 'condition_unmet', 'skipped_at', now()),
          'step:' || v_slug || ':skipped', 'pgflow:run:' || v_run.run_id, false);
      end loop;
      perform pgflow_otp._release_children_of_skipped(v_run.run_id, v_run.flow_slug, v_skip);
      update pgflow.runs r
      set remaining_steps = r.remaining_steps - cardinality(v_skip)
      where r.run_id = v_run.run_id;
    end if;

    foreach v_slug in array coalesce(v_cascade, '{}') loop
      perform pgflow._cascade_force_skip_steps(v_run.run_id, v_slug, 'condition_unmet');
    end loop;

    select r.status into v_run.status from pgflow.runs r where r.run_id = v_run.run_id;
    if v_run.status <> 'started' then
      return v_run.status <> 'failed';
    end if;
    exit when v_skip is null;
  end loop;
  return true;
end
$$;

-- A skipped step satisfies its children; a map of nothing but a skipped step has no items.
create function pgflow_otp._release_children_of_skipped(p_run_id uuid, p_flow_slug text, p_skipped text[]) returns void
language sql volatile set search_path to '' as $$
  update pgflow.step_states cs
  set remaining_deps = cs.remaining_deps - c.parents,
      initial_tasks = case when c.step_type = 'map' and c.deps_count = 1 then 0 else cs.initial_tasks end
  from (
    select d.step_slug, count(*)::int as parents, st.step_type, st.deps_count
    from pgflow.deps d
    join pgflow.steps st on st.flow_slug = d.flow_slug and st.step_slug = d.step_slug
    where d.flow_slug = p_flow_slug and d.dep_slug = any (p_skipped)
    group by d.step_slug, st.step_type, st.deps_count
  ) c
  where cs.run_id = p_run_id and cs.step_slug = c.step_slug
$$;

-- Complete the ready steps that have nothing to do, and what becomes ready and empty by that.
-- A step whose condition is unmet is left for cascade_resolve_conditions.
create function pgflow.cascade_complete_taskless_steps(run_id uuid) returns int
language plpgsql volatile as $$
declare
  v_flow_slug text;
  v_round int := 0;
  v_total int := 0;
  v_completed text[];
  v_step record;
begin
  loop
    v_round := v_round + 1;
    if v_round > 50 then
      raise exception 'Cascade loop exceeded safety limit of 50 iterations';
    end if;

    with completed as (
      update pgflow.step_states ss
      set status = 'completed', started_at = now(), completed_at = now(), remaining_tasks = 0,
          output = case when st.step_type = 'map' then '[]'::jsonb end
      from pgflow.steps st
      where ss.run_id = cascade_complete_taskless_steps.run_id
        and st.flow_slug = ss.flow_slug
        and st.step_slug = ss.step_slug
        and ss.status = 'created'
        and ss.remaining_deps = 0
        and ss.initial_tasks = 0
        and (
          (st.required_input_pattern is null and st.forbidden_input_pattern is null)
          or not exists (
            select from pgflow_otp._unmet_conditions(cascade_complete_taskless_steps.run_id) u
            where u.step_slug = ss.step_slug
          )
        )
      returning ss.flow_slug, ss.step_slug, st.step_index
    )
    select array_agg(c.step_slug order by c.step_index), min(c.flow_slug)
    into v_completed, v_flow_slug
    from completed c;
    exit when v_completed is null;

    for v_step in
      select ss.*
      from unnest(v_completed) with ordinality as k(slug, place)
      join pgflow.step_states ss on ss.run_id = cascade_complete_taskless_steps.run_id and ss.step_slug = k.slug
      order by k.place
    loop
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:completed', 'run_id', v_step.run_id, 'step_slug', v_step.step_slug,
          'status', 'completed', 'started_at', v_step.started_at, 'completed_at', v_step.completed_at,
          'remaining_tasks', 0, 'remaining_deps', 0, 'output', v_step.output),
        'step:' || v_step.step_slug || ':completed', 'pgflow:run:' || v_step.run_id, false);
    end loop;

    update pgflow.step_states cs
    set remaining_deps = cs.remaining_deps - c.parents,
        initial_tasks = case when c.step_type = 'map' then 0 else cs.initial_tasks end
    from (
      select d.step_slug, count(*)::int as parents, st.step_type
      from pgflow.deps d
      join pgflow.steps st on st.flow_slug = d.flow_slug and st.step_slug = d.step_slug
      where d.flow_slug = v_flow_slug and d.dep_slug = any (v_completed)
      group by d.step_slug, st.step_type
    ) c
    where cs.run_id = cascade_complete_taskless_steps.run_id and cs.step_slug = c.step_slug;

    update pgflow.runs r
    set remaining_steps = r.remaining_steps - cardinality(v_completed)
    where r.run_id = cascade_complete_taskless_steps.run_id;
    v_total := v_total + cardinality(v_completed);
  end loop;
  return v_total;
end
$$;

-- Conditions and taskless steps in turn until neither has anything left to say: a step that becomes ready because a
-- taskless one completed is judged too. False when the run failed.
create function pgflow_otp._settle_cascades(p_run_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
begin
  loop
    if not pgflow.cascade_resolve_conditions(p_run_id) then
      return false;
    end if;
    exit when pgflow.cascade_complete_taskless_steps(p_run_id) = 0;
  end loop;
  return true;
end
$$;

create function pgflow.maybe_complete_run(run_id uuid) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
begin
  update pgflow.runs r
  set status = 'completed',
      completed_at = now(),
      output = (
        select jsonb_object_agg(ss.step_slug, ss.output)
        from pgflow.step_states ss
        where ss.run_id = r.run_id
          and ss.status = 'completed'
          and not exists (
            select from pgflow.deps d where d.flow_slug = ss.flow_slug and d.dep_slug = ss.step_slug
          )
      )
  where r.run_id = maybe_complete_run.run_id
    and r.remaining_steps = 0
    and r.status <> 'completed'
  returning * into v_run;
  if found then
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'run:completed', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug,
        'status', 'completed', 'output', v_run.output, 'completed_at', v_run.completed_at),
      'run:completed', 'pgflow:run:' || v_run.run_id, false);
  end if;
end
$$;

-- Start every step whose dependencies are settled and that has tasks: one message per task, sent in one batch.
create function pgflow.start_ready_steps(run_id uuid) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_ready record;
begin
  if exists (
    select from pgflow.runs r
    where r.run_id = start_ready_steps.run_id and r.status in ('failed', 'completed')
  ) then
    return;
  end if;

  for v_ready in
    select ss.flow_slug, ss.step_slug, ss.initial_tasks, st.queue_name, coalesce(st.opt_start_delay, 0) as delay
    from pgflow.step_states ss
    join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
    where ss.run_id = start_ready_steps.run_id
      and ss.status = 'created'
      and ss.remaining_deps = 0
      and ss.initial_tasks > 0
    order by ss.step_slug
    for update of ss
  loop
    update pgflow.step_states ss
    set status = 'started', started_at = now(), remaining_tasks = ss.initial_tasks
    where ss.run_id = start_ready_steps.run_id and ss.step_slug = v_ready.step_slug;

    perform realtime.send(
      jsonb_build_object(
        'event_type', 'step:started', 'run_id', start_ready_steps.run_id, 'step_slug', v_ready.step_slug,
        'status', 'started', 'started_at', now(), 'remaining_tasks', v_ready.initial_tasks, 'remaining_deps', 0),
      'step:' || v_ready.step_slug || ':started', 'pgflow:run:' || start_ready_steps.run_id, false);

    insert into pgflow.step_tasks (flow_slug, run_id, step_slug, task_index, message_id, queue_name)
    select v_ready.flow_slug, start_ready_steps.run_id, v_ready.step_slug, sent.n - 1, sent.msg_id, v_ready.queue_name
    from pgmq.send_batch(
      v_ready.queue_name,
      array(
        select jsonb_build_object(
          'flow_slug', v_ready.flow_slug, 'run_id', start_ready_steps.run_id,
          'step_slug', v_ready.step_slug, 'task_index', i.task_index)
        from generate_series(0, v_ready.initial_tasks - 1) as i(task_index)
        order by i.task_index
      ),
      v_ready.delay
    ) with ordinality as sent(msg_id, n);
  end loop;
end
$$;
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
-- The life of a task: claimed, completed, failed.

-- Claim the tasks of messages that were just read. The task rows come first, then the messages; a message that cannot
-- be extended undoes the whole claim, since another worker would see it again while the task runs.
create function pgflow.start_tasks(
  flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text, step_slug text
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' set plan_cache_mode to force_custom_plan as $$
declare
  v_queue_mode text;
  v_run_ids uuid[];
  v_step_slugs text[];
  v_task_indexes int[];
  v_message_ids bigint[];
  v_attempts int[];
  v_offsets int[];
  v_extended int;
begin
  select f.queue_mode into v_queue_mode from pgflow.flows f where f.flow_slug = start_tasks.flow_slug;
  if not found then
    return;
  end if;
  if v_queue_mode = 'step' then
    if start_tasks.step_slug is null then
      raise exception 'Flow "%" uses per-step queues: an exact step_slug is required to claim tasks.',
        start_tasks.flow_slug;
    end if;
    if not exists (
      select from pgflow.steps st
      where st.flow_slug = start_tasks.flow_slug
        and st.step_slug = start_tasks.step_slug
        and st.queue_name = start_tasks.queue_name
    ) then
      raise exception 'Step "%" does not route to queue "%" in flow "%".',
        start_tasks.step_slug, start_tasks.queue_name, start_tasks.flow_slug;
    end if;
  elsif start_tasks.step_slug is not null then
    raise exception 'Flow "%" uses the default flow queue: a step selector is not allowed.', start_tasks.flow_slug;
  end if;

  with candidates as materialized (
    select t.run_id, t.step_slug, t.task_index
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    where t.flow_slug = start_tasks.flow_slug
      and t.queue_name = start_tasks.queue_name
      and t.message_id = any (start_tasks.msg_ids)
      and (start_tasks.step_slug is null or t.step_slug = start_tasks.step_slug)
      and t.status = 'queued'
      and r.status = 'started'
      and ss.status = 'started'
    -- Whoever holds a task is about to change it: waiting for it here, with others already locked, could deadlock.
    order by t.run_id, t.step_slug, t.task_index
    for update of t skip locked
  ), claimed as (
    update pgflow.step_tasks t
    set status = 'started',
        attempts_count = t.attempts_count + 1,
        started_at = greatest(now(), t.queued_at),
        last_worker_id = start_tasks.worker_id
    from candidates c
    where t.run_id = c.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
      and t.status = 'queued'
    returning t.flow_slug, t.run_id, t.step_slug, t.task_index, t.message_id, t.attempts_count
  )
  select
    array_agg(c.run_id order by c.message_id),
    array_agg(c.step_slug order by c.message_id),
    array_agg(c.task_index order by c.message_id),
    array_agg(c.message_id order by c.message_id),
    array_agg(c.attempts_count order by c.message_id),
    array_agg(coalesce(st.opt_timeout, f.opt_timeout) + 2 order by c.message_id)
  into v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts, v_offsets
  from claimed c
  join pgflow.steps st on st.flow_slug = c.flow_slug and st.step_slug = c.step_slug
  join pgflow.flows f on f.flow_slug = c.flow_slug;
  if v_message_ids is null then
    return;
  end if;

  select count(*) into v_extended
  from pgflow.set_vt_batch(start_tasks.queue_name, v_message_ids, v_offsets);
  if v_extended <> cardinality(v_message_ids) then
    raise invalid_text_representation using message = format(
      'invalid input syntax for type integer: "start_tasks(): visibility updated %s of %s claimed messages"',
      v_extended, cardinality(v_message_ids));
  end if;

  return query
  with claimed as (
    select *
    from unnest(v_run_ids, v_step_slugs, v_task_indexes, v_message_ids, v_attempts)
      as u(run_id, step_slug, task_index, message_id, attempts_count)
  ), inputs as materialized (
    -- Once per step of a run, not once per task: a map's array is gathered a single time.
    select k.run_id, k.step_slug, st.step_type, st.deps_count,
      case when st.deps_count = 0 then r.input end as run_input,
      case
        when st.step_type = 'map' and st.deps_count = 0 then r.input
        when st.step_type = 'map' then (
          select ds.output
          from pgflow.deps d
          join pgflow.step_states ds on ds.run_id = k.run_id and ds.step_slug = d.dep_slug
          where d.flow_slug = start_tasks.flow_slug and d.step_slug = k.step_slug and ds.status = 'completed'
        )
        else (
          select coalesce(jsonb_object_agg(ds.step_slug, coalesce(ds.output, 'null'::jsonb)), '{}'::jsonb)
          from pgflow.deps d
          join pgflow.step_states ds on ds.run_id = k.run_id and ds.step_slug = d.dep_slug
          where d.flow_slug = start_tasks.flow_slug and d.step_slug = k.step_slug and ds.status = 'completed'
        )
      end as input
    from (select distinct c.run_id, c.step_slug from claimed c) k
    join pgflow.runs r on r.run_id = k.run_id
    join pgflow.steps st on st.flow_slug = start_tasks.flow_slug and st.step_slug = k.step_slug
  )
  select
    start_tasks.flow_slug,
    c.run_id,
    c.step_slug,
    case when i.step_type = 'map' then i.input -> c.task_index else i.input end,
    c.message_id,
    c.task_index,
    case when i.step_type = 'single' then i.run_input end,
    c.attempts_count
  from claimed c
  join inputs i on i.run_id = c.run_id and i.step_slug = c.step_slug;
end
$$;

create function pgflow.start_tasks(flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text)
returns setof pgflow.step_task_record
language sql volatile set search_path to '' as $$
  select * from pgflow.start_tasks(
    start_tasks.flow_slug, start_tasks.msg_ids, start_tasks.worker_id, start_tasks.queue_name, null::text)
$$;

-- Polling used to be one call; it claims nothing any more.
create function pgflow.poll_for_tasks(
  queue_name text, vt int, qty int, max_poll_seconds int default 5, poll_interval_ms int default 100
) returns setof pgflow.step_task_record
language plpgsql volatile set search_path to '' as $$
begin
  raise notice 'DEPRECATED: poll_for_tasks is deprecated and returns no tasks. Read with pgmq.read, then call start_tasks.';
end
$$;

-- Fail a run because a single step gave something else than an array to a map. No policy softens it.
create function pgflow_otp._fail_type_violation(
  p_run pgflow.runs, p_step_slug text, p_task_index int, p_output jsonb, p_child_slug text
) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_kind constant text := coalesce(jsonb_typeof(p_output), 'null');
  v_error constant text := format(
    '[TYPE_VIOLATION] Map step %s expects array input but dependency %s produced %s',
    p_child_slug, p_step_slug, v_kind);
begin
  update pgflow.step_tasks t
  set status = 'failed', failed_at = now(), output = p_output,
      error_message = format('[TYPE_VIOLATION] Produced %s instead of array', v_kind)
  where t.run_id = p_run.run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;

  update pgflow.runs r set status = 'failed', failed_at = now() where r.run_id = p_run.run_id;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'run:failed', 'run_id', p_run.run_id, 'flow_slug', p_run.flow_slug, 'status', 'failed',
      'failed_at', now()),
    'run:failed', 'pgflow:run:' || p_run.run_id, false);

  update pgflow.step_states ss
  set status = 'failed', failed_at = now(), error_message = v_error
  where ss.run_id = p_run.run_id and ss.step_slug = p_step_slug;
  perform realtime.send(
    jsonb_build_object(
      'event_type', 'step:failed', 'run_id', p_run.run_id, 'step_slug', p_step_slug, 'status', 'failed',
      'error_message', v_error, 'failed_at', now()),
    'step:' || p_step_slug || ':failed', 'pgflow:run:' || p_run.run_id, false);

  perform pgflow_otp._end_open_tasks(p_run.run_id, null, 'cancelled');
  perform pgflow._archive_task_message(p_run.run_id, p_step_slug, p_task_index);
end
$$;

create function pgflow.complete_task(run_id uuid, step_slug text, task_index int, output jsonb)
returns setof pgflow.step_tasks
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_state pgflow.step_states;
  v_task pgflow.step_tasks;
  v_step_type text;
  v_child text;
  v_items int;
begin
  select * into v_task from pgflow.step_tasks t
  where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index;
  if not found then
    return;
  end if;
  if exists (select from pgflow.runs r where r.run_id = complete_task.run_id and r.status = 'failed') then
    return next v_task;
    return;
  end if;

  -- Whatever was read before these two locks is read again after them.
  select * into v_run from pgflow.runs r where r.run_id = complete_task.run_id for update;
  select * into v_state from pgflow.step_states ss
  where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug
  for update;
  if v_run.status = 'failed' or v_state.status <> 'started' then
    perform pgflow._archive_task_message(
      complete_task.run_id, complete_task.step_slug, complete_task.task_index);
    return query select * from pgflow.step_tasks t
      where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
        and t.task_index = complete_task.task_index;
    return;
  end if;

  select st.step_type into v_step_type
  from pgflow.steps st
  where st.flow_slug = v_run.flow_slug and st.step_slug = complete_task.step_slug;

  if v_step_type = 'single' and jsonb_typeof(complete_task.output) is distinct from 'array' then
    select c.step_slug into v_child
    from pgflow.deps d
    join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
    join pgflow.step_states cs on cs.run_id = complete_task.run_id and cs.step_slug = c.step_slug
    where d.flow_slug = v_run.flow_slug
      and d.dep_slug = complete_task.step_slug
      and c.step_type = 'map'
      and cs.initial_tasks is null
    order by c.step_index
    limit 1;
    if found then
      perform pgflow_otp._fail_type_violation(
        v_run, complete_task.step_slug, complete_task.task_index, complete_task.output, v_child);
      return query select * from pgflow.step_tasks t
        where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
          and t.task_index = complete_task.task_index;
      return;
    end if;
  end if;

  update pgflow.step_tasks t
  set status = 'completed', completed_at = greatest(now(), t.started_at), output = complete_task.output
  where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index and t.status = 'started'
  returning * into v_task;
  if found then
    if v_state.remaining_tasks > 1 then
      update pgflow.step_states ss
      set remaining_tasks = ss.remaining_tasks - 1
      where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug;
    else
      update pgflow.step_states ss
      set remaining_tasks = 0,
          status = 'completed',
          completed_at = now(),
          output = case
            when v_step_type = 'single' then complete_task.output
            else (
              select jsonb_agg(coalesce(t.output, 'null'::jsonb) order by t.task_index)
              from pgflow.step_tasks t
              where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
            )
          end
      where ss.run_id = complete_task.run_id and ss.step_slug = complete_task.step_slug
      returning * into v_state;

      if jsonb_typeof(v_state.output) = 'array' then
        v_items := jsonb_array_length(v_state.output);
      end if;
      update pgflow.step_states cs
      set remaining_deps = cs.remaining_deps - 1,
          initial_tasks = case
            when c.step_type = 'map' and cs.initial_tasks is null then v_items
            else cs.initial_tasks
          end
      from pgflow.deps d
      join pgflow.steps c on c.flow_slug = d.flow_slug and c.step_slug = d.step_slug
      where d.flow_slug = v_run.flow_slug
        and d.dep_slug = complete_task.step_slug
        and cs.run_id = complete_task.run_id
        and cs.step_slug = d.step_slug;

      update pgflow.runs r set remaining_steps = r.remaining_steps - 1 where r.run_id = complete_task.run_id;

      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:completed', 'run_id', v_state.run_id, 'step_slug', v_state.step_slug,
          'status', 'completed', 'output', v_state.output, 'completed_at', v_state.completed_at),
        'step:' || v_state.step_slug || ':completed', 'pgflow:run:' || v_state.run_id, false);

      if not pgflow_otp._settle_cascades(complete_task.run_id) then
        perform pgflow._archive_task_message(
          complete_task.run_id, complete_task.step_slug, complete_task.task_index);
        return next v_task;
        return;
      end if;
    end if;
  else
    -- Another call settled it, or nobody has claimed it: the row is returned as it is now.
    select * into v_task from pgflow.step_tasks t
    where t.run_id = complete_task.run_id and t.step_slug = complete_task.step_slug
      and t.task_index = complete_task.task_index;
  end if;

  if v_task.status = 'completed' and v_task.message_id is not null then
    perform pgmq.archive(v_task.queue_name, v_task.message_id);
  end if;
  if v_state.status = 'completed' then
    perform pgflow.start_ready_steps(complete_task.run_id);
    perform pgflow.maybe_complete_run(complete_task.run_id);
  end if;
  return next v_task;
end
$$;

create function pgflow.fail_task(run_id uuid, step_slug text, task_index int, error_message text)
returns setof pgflow.step_tasks
language plpgsql volatile set search_path to '' as $$
declare
  v_run pgflow.runs;
  v_state pgflow.step_states;
  v_task pgflow.step_tasks;
  v_max_attempts int;
  v_base_delay int;
  v_when_exhausted text;
begin
  select * into v_run from pgflow.runs r where r.run_id = fail_task.run_id;
  if v_run.status = 'started' then
    select * into v_run from pgflow.runs r where r.run_id = fail_task.run_id for update;
    select * into v_state from pgflow.step_states ss
    where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug
    for update;
  end if;
  if v_run.status = 'failed' or v_state.status is distinct from 'started' then
    perform pgflow._archive_task_message(fail_task.run_id, fail_task.step_slug, fail_task.task_index);
    return query select * from pgflow.step_tasks t
      where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
        and t.task_index = fail_task.task_index;
    return;
  end if;

  select coalesce(st.opt_max_attempts, f.opt_max_attempts), coalesce(st.opt_base_delay, f.opt_base_delay),
    st.when_exhausted
  into v_max_attempts, v_base_delay, v_when_exhausted
  from pgflow.steps st
  join pgflow.flows f on f.flow_slug = st.flow_slug
  where st.flow_slug = v_run.flow_slug and st.step_slug = fail_task.step_slug;

  -- The message of a task that recovery gave up on is archived already: it cannot be tried again.
  update pgflow.step_tasks t
  set status = case when a.is_left then 'queued' else 'failed' end,
      started_at = case when a.is_left then null else t.started_at end,
      failed_at = case when a.is_left then null else greatest(now(), t.started_at) end,
      error_message = fail_task.error_message
  from (
    select s.attempts_count < v_max_attempts and s.permanently_stalled_at is null as is_left
    from pgflow.step_tasks s
    where s.run_id = fail_task.run_id and s.step_slug = fail_task.step_slug and s.task_index = fail_task.task_index
    for update
  ) a
  where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
    and t.task_index = fail_task.task_index and t.status = 'started'
  returning t.* into v_task;

  if found and v_task.status = 'failed' then
    if v_when_exhausted = 'fail' then
      update pgflow.step_states ss
      set status = 'failed', failed_at = v_task.failed_at, error_message = fail_task.error_message
      where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug;
      update pgflow.runs r set status = 'failed', failed_at = v_task.failed_at where r.run_id = fail_task.run_id;
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:failed', 'run_id', v_run.run_id, 'step_slug', v_state.step_slug,
          'status', 'failed', 'error_message', fail_task.error_message, 'failed_at', v_task.failed_at),
        'step:' || v_state.step_slug || ':failed', 'pgflow:run:' || v_run.run_id, false);
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'run:failed', 'run_id', v_run.run_id, 'flow_slug', v_run.flow_slug,
          'status', 'failed', 'error_message', fail_task.error_message, 'failed_at', v_task.failed_at),
        'run:failed', 'pgflow:run:' || v_run.run_id, false);
      perform pgflow_otp._end_open_tasks(v_run.run_id, null, 'cancelled');
    else
      update pgflow.step_states ss
      set status = 'skipped', skip_reason = 'handler_failed', skipped_at = now(), remaining_tasks = null,
          error_message = fail_task.error_message
      where ss.run_id = fail_task.run_id and ss.step_slug = fail_task.step_slug;
      update pgflow.runs r set remaining_steps = r.remaining_steps - 1 where r.run_id = fail_task.run_id;
      perform pgflow_otp._end_open_tasks(v_run.run_id, array[v_state.step_slug], 'skipped');
      perform realtime.send(
        jsonb_build_object(
          'event_type', 'step:skipped', 'run_id', v_run.run_id, 'step_slug', v_state.step_slug,
          'status', 'skipped', 'skip_reason', 'handler_failed', 'error_message', fail_task.error_message,
          'skipped_at', now()),
        'step:' || v_state.step_slug || ':skipped', 'pgflow:run:' || v_run.run_id, false);

      if v_when_exhausted = 'skip-cascade' then
        perform pgflow._cascade_force_skip_steps(v_run.run_id, v_state.step_slug, 'handler_failed');
      else
        perform pgflow_otp._release_children_of_skipped(
          v_run.run_id, v_run.flow_slug, array[v_state.step_slug]);
        if not pgflow_otp._settle_cascades(v_run.run_id) then
          perform pgflow._archive_task_message(fail_task.run_id, fail_task.step_slug, fail_task.task_index);
          return next v_task;
          return;
        end if;
        perform pgflow.start_ready_steps(v_run.run_id);
      end if;
      perform pgflow.maybe_complete_run(v_run.run_id);
    end if;
  elsif v_task.run_id is null then
    select * into v_task from pgflow.step_tasks t
    where t.run_id = fail_task.run_id and t.step_slug = fail_task.step_slug
      and t.task_index = fail_task.task_index;
    if not found then
      return;
    end if;
  end if;

  if v_task.message_id is not null then
    if v_task.status = 'queued' then
      perform pgmq.set_vt(
        v_task.queue_name, v_task.message_id,
        pgflow.calculate_retry_delay(v_base_delay, v_task.attempts_count));
    elsif v_task.status = 'failed' then
      perform pgmq.archive(v_task.queue_name, v_task.message_id);
    end if;
  end if;
  return next v_task;
end
$$;
-- Tasks whose worker never came back with an answer.

-- Requeue what is overdue by more than p_buffer seconds; after the third time stamp it and archive its message.
-- Rows are taken with SKIP LOCKED, so this waits for nobody. Messages are touched after the tasks, for every queue,
-- whether or not anything was requeued.
create function pgflow_otp._requeue_stalled(p_buffer double precision, out requeued int, out made_visible bigint)
language plpgsql volatile set search_path to '' as $$
declare
  v_archived bigint;
begin
  with stalled as materialized (
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    join pgflow.runs r on r.run_id = t.run_id
    join pgflow.step_states ss on ss.run_id = t.run_id and ss.step_slug = t.step_slug
    join pgflow.steps st on st.flow_slug = t.flow_slug and st.step_slug = t.step_slug
    join pgflow.flows f on f.flow_slug = t.flow_slug
    where t.status = 'started'
      and t.permanently_stalled_at is null
      and r.status = 'started'
      and ss.status = 'started'
      and t.started_at < now() - make_interval(secs => coalesce(st.opt_timeout, f.opt_timeout) + p_buffer)
    order by t.run_id, t.step_slug, t.task_index
    for update of t skip locked
  ), again as (
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        requeued_count = t.requeued_count + 1, last_requeued_at = now()
    from stalled s
    where s.requeued_count < 3
      and t.run_id = s.run_id and t.step_slug = s.step_slug and t.task_index = s.task_index
    returning t.queue_name, t.message_id
  ), given_up as (
    update pgflow.step_tasks t
    set permanently_stalled_at = now()
    from stalled s
    where s.requeued_count >= 3
      and t.run_id = s.run_id and t.step_slug = s.step_slug and t.task_index = s.task_index
    returning t.queue_name, t.message_id
  ), visible as (
    select v.msg_id
    from (
      select a.queue_name, array_agg(a.message_id) as ids
      from again a where a.message_id is not null group by a.queue_name
    ) q
    cross join lateral pgflow.set_vt_batch(q.queue_name, q.ids, array_fill(0, array[cardinality(q.ids)])) v
  ), archived as (
    select a.msg_id
    from (
      select g.queue_name, array_agg(g.message_id) as ids
      from given_up g where g.message_id is not null group by g.queue_name
    ) q
    cross join lateral pgmq.archive(q.queue_name, q.ids) as a(msg_id)
  )
  select
    (select count(*) from again), (select count(*) from visible), (select count(*) from archived)
  into requeued, made_visible, v_archived;
end
$$;

create function pgflow.requeue_stalled_tasks() returns int
language sql volatile security definer set search_path to '' as $$
  select s.requeued from pgflow_otp._requeue_stalled(30) s
$$;

create function pgflow.track_worker_function(function_name text, start_mode text default 'http') returns void
language sql volatile as $$
  insert into pgflow.worker_functions as w (function_name, start_mode)
  values (track_worker_function.function_name, track_worker_function.start_mode)
  on conflict on constraint worker_functions_pkey
  do update set start_mode = excluded.start_mode, updated_at = clock_timestamp()
$$;

create function pgflow.mark_worker_stopped(worker_id uuid) returns void
language sql volatile as $$
  update pgflow.workers w set stopped_at = clock_timestamp() where w.worker_id = mark_worker_stopped.worker_id
$$;
-- Registering whole flows: routes, shapes, comparison, creation, deletion.

-- The queue of one step of a flow with per-step queues. Readable if it fits, else by index; never cut, never hashed.
create function pgflow._resolve_step_queue_name(p_flow_slug text, p_step_slug text, p_step_index int) returns text
language plpgsql immutable set search_path to '' as $$
declare
  v_readable constant text := lower(p_flow_slug || '__' || p_step_slug);
  v_fallback constant text := lower(p_flow_slug || '__' || p_step_index);
  v_shortest constant text := lower(p_flow_slug || '__0');
begin
  if length(v_readable) <= 47 then
    return v_readable;
  end if;
  if length(v_shortest) > 47 then
    raise exception using
      message = format('Flow "%s" cannot use per-step queues.', p_flow_slug),
      detail = format('The shortest required queue "%s" is %s characters; PGMQ allows at most 47.',
        v_shortest, length(v_shortest)),
      hint = 'Shorten the concrete flow slug or use the default single queue.';
  end if;
  if length(v_fallback) <= 47 then
    return v_fallback;
  end if;
  raise exception using
    message = format('Cannot derive a queue for step "%s" at index %s in flow "%s".',
      p_step_slug, p_step_index, p_flow_slug),
    detail = format('The readable name is %s characters and the index fallback is %s; PGMQ allows at most 47.',
      length(v_readable), length(v_fallback)),
    hint = 'Shorten the concrete flow slug, shorten the step slug enough for the readable name, or use the default single queue.';
end
$$;

create function pgflow._derive_queue_routes(p_flow_slug text, p_shape jsonb, p_queue_mode text) returns jsonb
language plpgsql volatile set search_path to '' as $$
declare
  v_routes jsonb := '[]';
  v_step record;
  v_other text;
  v_queue text;
begin
  if p_queue_mode is null or p_queue_mode not in ('flow', 'step') then
    raise exception 'Unknown queue mode "%".', p_queue_mode;
  end if;
  if p_queue_mode = 'step' and coalesce(jsonb_array_length(p_shape -> 'steps'), 0) = 0 then
    raise exception 'Flow "%" cannot use per-step queues: it has no steps.', p_flow_slug;
  end if;
  if not pgflow.is_valid_slug(p_flow_slug) then
    raise exception 'Flow slug "%" is not valid.', p_flow_slug;
  end if;

  for v_step in
    select s.value ->> 'slug' as slug
    from jsonb_array_elements(p_shape -> 'steps') with ordinality as s(value, place)
    order by s.place
  loop
    if not pgflow.is_valid_slug(v_step.slug) then
      raise exception 'Step slug "%" in flow "%" is not valid.', v_step.slug, p_flow_slug;
    end if;
  end loop;

  for v_step in
    select s.value ->> 'slug' as slug, (s.place - 1)::int as step_index
    from jsonb_array_elements(p_shape -> 'steps') with ordinality as s(value, place)
    order by s.place
  loop
    select r.value ->> 'stepSlug' into v_other
    from jsonb_array_elements(v_routes) as r(value)
    where lower(r.value ->> 'stepSlug') = lower(v_step.slug);
    if found then
      raise exception 'Steps "%" and "%" in flow "%" conflict case-insensitively.', v_other, v_step.slug, p_flow_slug;
    end if;

    if p_queue_mode = 'flow' then
      v_queue := lower(p_flow_slug);
    else
      v_queue := pgflow._resolve_step_queue_name(p_flow_slug, v_step.slug, v_step.step_index);
      perform pgmq.validate_queue_name(v_queue);
      select r.value ->> 'stepSlug' into v_other
      from jsonb_array_elements(v_routes) as r(value)
      where r.value ->> 'queueName' = v_queue;
      if found then
        raise exception 'Steps "%" and "%" in flow "%" both resolve to queue "%".',
          v_other, v_step.slug, p_flow_slug, v_queue;
      end if;
    end if;
    v_routes := v_routes || jsonb_build_object('stepSlug', v_step.slug, 'queueName', v_queue);
  end loop;
  return v_routes;
end
$$;

-- True: the caller has to create the queue. False: it exists and is this flow's own.
create function pgflow._assert_step_queue_available(p_flow_slug text, p_queue_name text) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_other text;
  v_spellings text[];
  v_owned boolean;
begin
  select o.flow_slug into v_other
  from (
    select st.flow_slug from pgflow.steps st where st.queue_name = p_queue_name
    union
    select f.flow_slug from pgflow.flows f where f.queue_mode = 'flow' and lower(f.flow_slug) = p_queue_name
  ) o
  where lower(o.flow_slug) <> lower(p_flow_slug)
  order by o.flow_slug
  limit 1;
  if found then
    raise exception 'cannot create flow "%": queue "%" is already used by another flow ("%")',
      p_flow_slug, p_queue_name, v_other;
  end if;

  select array_agg(q.queue_name::text order by q.queue_name::text)
  into v_spellings
  from pgmq.list_queues() q
  where lower(q.queue_name) = p_queue_name;
  if cardinality(v_spellings) > 1 then
    raise exception 'queue "%" matches multiple listed PGMQ queues (%)', p_queue_name, v_spellings;
  end if;

  v_owned := exists (
    select from pgflow.steps st where st.flow_slug = p_flow_slug and st.queue_name = p_queue_name);
  if v_owned and v_spellings is null then
    raise exception 'queue "%" owned by flow "%" is not listed in PGMQ', p_queue_name, p_flow_slug;
  end if;
  if v_owned then
    return false;
  end if;
  if v_spellings is not null then
    raise exception 'cannot create flow "%": queue "%" is already listed in PGMQ and not owned by this flow',
      p_flow_slug, p_queue_name;
  end if;
  return true;
end
$$;

create function pgflow._get_flow_shape(p_flow_slug text) returns jsonb
language sql stable set search_path to '' as $$
  select jsonb_build_object('steps', coalesce(jsonb_agg(
    jsonb_build_object(
      'slug', st.step_slug,
      'stepType', st.step_type,
      'dependencies', (
        select coalesce(jsonb_agg(d.dep_slug order by d.dep_slug), '[]'::jsonb)
        from pgflow.deps d
        where d.flow_slug = st.flow_slug and d.step_slug = st.step_slug
      ),
      'whenUnmet', st.when_unmet,
      'whenExhausted', st.when_exhausted,
      'requiredInputPattern', case
        when st.required_input_pattern is null then '{"defined": false}'::jsonb
        else jsonb_build_object('defined', true, 'value', st.required_input_pattern)
      end,
      'forbiddenInputPattern', case
        when st.forbidden_input_pattern is null then '{"defined": false}'::jsonb
        else jsonb_build_object('defined', true, 'value', st.forbidden_input_pattern)
      end
    ) order by st.step_index), '[]'::jsonb))
  from pgflow.steps st
  where st.flow_slug = p_flow_slug
$$;

create function pgflow._compare_flow_shapes(p_local jsonb, p_db jsonb) returns text[]
language plpgsql stable set search_path to '' as $$
declare
  v_differences text[] := '{}';
  v_local_count constant int := coalesce(jsonb_array_length(p_local -> 'steps'), 0);
  v_db_count constant int := coalesce(jsonb_array_length(p_db -> 'steps'), 0);
  v_a jsonb;
  v_b jsonb;
  v_at text;
  v_deps_a text;
  v_deps_b text;
begin
  if v_local_count <> v_db_count then
    v_differences := v_differences || format('Step count differs: %s vs %s', v_local_count, v_db_count);
  end if;

  for i in 0 .. greatest(v_local_count, v_db_count) - 1 loop
    v_a := p_local -> 'steps' -> i;
    v_b := p_db -> 'steps' -> i;
    v_at := format('Step at index %s:', i);
    if v_a is null then
      v_differences := v_differences
        || format('%s missing in first shape (second has ''%s'')', v_at, v_b ->> 'slug');
      continue;
    elsif v_b is null then
      v_differences := v_differences
        || format('%s missing in second shape (first has ''%s'')', v_at, v_a ->> 'slug');
      continue;
    end if;

    if v_a ->> 'slug' <> v_b ->> 'slug' then
      v_differences := v_differences
        || format('%s slug differs ''%s'' vs ''%s''', v_at, v_a ->> 'slug', v_b ->> 'slug');
    end if;
    if v_a ->> 'stepType' <> v_b ->> 'stepType' then
      v_differences := v_differences
        || format('%s type differs ''%s'' vs ''%s''', v_at, v_a ->> 'stepType', v_b ->> 'stepType');
    end if;
    select string_agg(d.slug, ', ' order by d.slug) into v_deps_a
    from (select distinct e.slug from jsonb_array_elements_text(v_a -> 'dependencies') as e(slug)) d;
    select string_agg(d.slug, ', ' order by d.slug) into v_deps_b
    from (select distinct e.slug from jsonb_array_elements_text(v_b -> 'dependencies') as e(slug)) d;
    if v_deps_a is distinct from v_deps_b then
      v_differences := v_differences
        || format('%s dependencies differ [%s] vs [%s]', v_at, coalesce(v_deps_a, ''), coalesce(v_deps_b, ''));
    end if;
    if v_a ->> 'whenUnmet' <> v_b ->> 'whenUnmet' then
      v_differences := v_differences
        || format('%s whenUnmet differs ''%s'' vs ''%s''', v_at, v_a ->> 'whenUnmet', v_b ->> 'whenUnmet');
    end if;
    if v_a ->> 'whenExhausted' <> v_b ->> 'whenExhausted' then
      v_differences := v_differences
        || format('%s whenExhausted differs ''%s'' vs ''%s''',
          v_at, v_a ->> 'whenExhausted', v_b ->> 'whenExhausted');
    end if;
    if v_a -> 'requiredInputPattern' is distinct from v_b -> 'requiredInputPattern' then
      v_differences := v_differences
        || format('%s requiredInputPattern differs ''%s'' vs ''%s''',
          v_at, v_a -> 'requiredInputPattern', v_b -> 'requiredInputPattern');
    end if;
    if v_a -> 'forbiddenInputPattern' is distinct from v_b -> 'forbiddenInputPattern' then
      v_differences := v_differences
        || format('%s forbiddenInputPattern differs ''%s'' vs ''%s''',
          v_at, v_a -> 'forbiddenInputPattern', v_b -> 'forbiddenInputPattern');
    end if;
  end loop;
  return v_differences;
end
$$;

create function pgflow._create_flow_from_shape(p_flow_slug text, p_shape jsonb, p_queue_mode text default 'flow')
returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_options constant jsonb := coalesce(p_shape -> 'options', '{}');
  v_routes jsonb;
  v_step record;
  v_deps text[];
  v_missing text[] := '{}';
  v_queue text;
begin
  perform pg_advisory_xact_lock(1, hashtext(lower(p_flow_slug)));
  v_routes := pgflow._derive_queue_routes(p_flow_slug, p_shape, p_queue_mode);

  if p_queue_mode = 'step' then
    -- All names are checked before the first queue is made.
    for v_queue in select r.value ->> 'queueName' from jsonb_array_elements(v_routes) as r(value) loop
      if pgflow._assert_step_queue_available(p_flow_slug, v_queue) then
        v_missing := v_missing || v_queue;
      end if;
    end loop;
    foreach v_queue in array v_missing loop
      perform pgmq.create(v_queue);
    end loop;
    insert into pgflow.flows (flow_slug, opt_max_attempts, opt_base_delay, opt_timeout, queue_mode)
    values (
      p_flow_slug,
      coalesce((v_options ->> 'maxAttempts')::int, 3),
      coalesce((v_options ->> 'baseDelay')::int, 5),
      coalesce((v_options ->> 'timeout')::int, 60),
      'step')
    on conflict on constraint flows_pkey do nothing;
  else
    perform pgflow.create_flow(
      p_flow_slug,
      (v_options ->> 'maxAttempts')::int, (v_options ->> 'baseDelay')::int, (v_options ->> 'timeout')::int);
  end if;

  for v_step in
    select
      s.value ->> 'slug' as slug,
      s.place::int - 1 as step_index,
      coalesce(s.value ->> 'stepType', 'single') as step_type,
      coalesce(s.value ->> 'whenUnmet', 'skip') as when_unmet,
      coalesce(s.value ->> 'whenExhausted', 'fail') as when_exhausted,
      coalesce(s.value -> 'options', '{}') as options,
      case when (s.value #>> '{requiredInputPattern,defined}')::boolean
        then s.value #> '{requiredInputPattern,value}' end as required,
      case when (s.value #>> '{forbiddenInputPattern,defined}')::boolean
        then s.value #> '{forbiddenInputPattern,value}' end as forbidden,
      s.value -> 'dependencies' as dependencies
    from jsonb_array_elements(p_shape -> 'steps') with ordinality as s(value, place)
    order by s.place
  loop
    v_deps := array(
      select d.slug
      from jsonb_array_elements_text(coalesce(v_step.dependencies, '[]')) with ordinality as d(slug, place)
      group by d.slug
      order by min(d.place));
    if p_queue_mode = 'step' then
      if v_step.step_type = 'map' and cardinality(v_deps) > 1 then
        raise exception 'Map step "%" can have at most one dependency, but % were provided: %',
          v_step.slug, cardinality(v_deps), array_to_string(v_deps, ', ');
      end if;
      insert into pgflow.steps (
        flow_slug, step_slug, step_type, step_index, deps_count,
        opt_max_attempts, opt_base_delay, opt_timeout, opt_start_delay,
        required_input_pattern, forbidden_input_pattern, when_unmet, when_exhausted, queue_name)
      values (
        p_flow_slug, v_step.slug, v_step.step_type, v_step.step_index,
        cardinality(v_deps),
        (v_step.options ->> 'maxAttempts')::int, (v_step.options ->> 'baseDelay')::int,
        (v_step.options ->> 'timeout')::int, (v_step.options ->> 'startDelay')::int,
        v_step.required, v_step.forbidden, v_step.when_unmet, v_step.when_exhausted,
        v_routes -> v_step.step_index ->> 'queueName');
      insert into pgflow.deps (flow_slug, dep_slug, step_slug)
      select p_flow_slug, d.slug, v_step.slug
      from unnest(v_deps) as d(slug);
    else
      perform pgflow.add_step(
        p_flow_slug, v_step.slug, v_deps,
        (v_step.options ->> 'maxAttempts')::int, (v_step.options ->> 'baseDelay')::int,
        (v_step.options ->> 'timeout')::int, (v_step.options ->> 'startDelay')::int,
        v_step.step_type, v_step.required, v_step.forbidden, v_step.when_unmet, v_step.when_exhausted);
    end if;
  end loop;
end
$$;

create function pgflow.delete_flow_and_data(p_flow_slug text) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_queue text;
begin
  perform pg_advisory_xact_lock(1, hashtext(lower(p_flow_slug)));
  if not exists (select from pgflow.flows f where f.flow_slug = p_flow_slug) then
    return;
  end if;

  -- Callbacks hold their run, claims their tasks, when they come to the queue's table.
  perform from pgflow.runs r where r.flow_slug = p_flow_slug order by r.run_id for update;
  perform from pgflow.step_tasks t
  where t.flow_slug = p_flow_slug
  order by t.run_id, t.step_slug, t.task_index
  for update;

  for v_queue in
    select st.queue_name from pgflow.steps st where st.flow_slug = p_flow_slug
    union
    select lower(f.flow_slug) from pgflow.flows f where f.flow_slug = p_flow_slug and f.queue_mode = 'flow'
  loop
    perform pgmq.drop_queue(pgflow._listed_queue_name(v_queue));
  end loop;

  delete from pgflow.step_tasks t where t.flow_slug = p_flow_slug;
  delete from pgflow.step_states ss where ss.flow_slug = p_flow_slug;
  delete from pgflow.runs r where r.flow_slug = p_flow_slug;
  delete from pgflow.deps d where d.flow_slug = p_flow_slug;
  delete from pgflow.steps st where st.flow_slug = p_flow_slug;
  delete from pgflow.flows f where f.flow_slug = p_flow_slug;
end
$$;

-- Register a flow, or verify that what is stored is the same. A different shape is never changed in place: it is
-- refused with the differences, or on a local Supabase replaced together with its runs.
create function pgflow.ensure_flow_compiled(flow_slug text, shape jsonb, queue_mode text, route_map jsonb default null)
returns jsonb
language plpgsql volatile set search_path to '' as $$
declare
  v_mode constant text := coalesce(ensure_flow_compiled.queue_mode, 'flow');
  v_flow pgflow.flows;
  v_routes jsonb;
  v_stored_routes jsonb;
  v_shape_differences text[];
  v_route_differences text[] := '{}';
  v_differences text[];
begin
  perform pg_advisory_xact_lock(1, hashtext(lower(ensure_flow_compiled.flow_slug)));

  v_routes := pgflow._derive_queue_routes(ensure_flow_compiled.flow_slug, ensure_flow_compiled.shape, v_mode);
  if ensure_flow_compiled.route_map is not null then
    if jsonb_array_length(ensure_flow_compiled.route_map) <> jsonb_array_length(v_routes) then
      raise exception 'supplied route map for flow "%" has % entries but % step(s) was derived',
        ensure_flow_compiled.flow_slug,
        jsonb_array_length(ensure_flow_compiled.route_map), jsonb_array_length(v_routes);
    end if;
    for i in 0 .. jsonb_array_length(v_routes) - 1 loop
      if ensure_flow_compiled.route_map -> i is distinct from v_routes -> i then
        raise exception 'supplied route map for flow "%" disagrees with the derived route at position %',
          ensure_flow_compiled.flow_slug, i + 1;
      end if;
    end loop;
  end if;

  select * into v_flow from pgflow.flows f where f.flow_slug = ensure_flow_compiled.flow_slug;
  if not found then
    perform pgflow._create_flow_from_shape(ensure_flow_compiled.flow_slug, ensure_flow_compiled.shape, v_mode);
    return jsonb_build_object('status', 'compiled', 'differences', '[]'::jsonb, 'mismatchKind', null);
  end if;

  v_shape_differences := pgflow._compare_flow_shapes(
    ensure_flow_compiled.shape, pgflow._get_flow_shape(ensure_flow_compiled.flow_slug));
  if v_flow.queue_mode <> v_mode then
    v_route_differences := v_route_differences
      || format('Queue mode differs: database has ''%s'', worker expects ''%s''', v_flow.queue_mode, v_mode);
  end if;
  select coalesce(
    jsonb_agg(jsonb_build_object('stepSlug', st.step_slug, 'queueName', st.queue_name) order by st.step_index),
    '[]'::jsonb)
  into v_stored_routes
  from pgflow.steps st
  where st.flow_slug = ensure_flow_compiled.flow_slug;
  if v_stored_routes <> v_routes then
    v_route_differences := v_route_differences || format(
      'Step routes differ: database has [%s], worker expects [%s]',
      (select string_agg((r.value ->> 'stepSlug') || ' -> ' || (r.value ->> 'queueName'), ', ' order by r.place)
       from jsonb_array_elements(v_stored_routes) with ordinality as r(value, place)),
      (select string_agg((r.value ->> 'stepSlug') || ' -> ' || (r.value ->> 'queueName'), ', ' order by r.place)
       from jsonb_array_elements(v_routes) with ordinality as r(value, place)));
  end if;
  v_differences := v_shape_differences || v_route_differences;

  if v_differences = '{}' then
    if v_mode = 'step' then
      perform pgflow._assert_step_queue_available(ensure_flow_compiled.flow_slug, r.value ->> 'queueName')
      from jsonb_array_elements(v_routes) as r(value);
    end if;
    return jsonb_build_object('status', 'verified', 'differences', '[]'::jsonb, 'mismatchKind', null);
  end if;

  if pgflow.is_local() then
    perform pgflow.delete_flow_and_data(ensure_flow_compiled.flow_slug);
    perform pgflow._create_flow_from_shape(ensure_flow_compiled.flow_slug, ensure_flow_compiled.shape, v_mode);
    return jsonb_build_object(
      'status', 'recompiled', 'differences', to_jsonb(v_differences), 'mismatchKind', null);
  end if;
  return jsonb_build_object(
    'status', 'mismatch', 'differences', to_jsonb(v_differences),
    'mismatchKind', case when v_shape_differences = '{}' then 'routing' else 'shape' end);
end
$$;

create function pgflow.ensure_flow_compiled(flow_slug text, shape jsonb) returns jsonb
language sql volatile set search_path to '' as $$
  select pgflow.ensure_flow_compiled(
    ensure_flow_compiled.flow_slug, ensure_flow_compiled.shape, 'flow'::text, null::jsonb)
$$;
-- Other runtimes read the level of the schema from the comment of a view.
create view pgflow.pgflow_version as select null::text as placeholder;
comment on view pgflow.pgflow_version is 'PgFlow version=2';
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
-- What this runtime's workers call: one round trip per decision, and no answer of an overtaken attempt accepted.

-- Read messages and claim their tasks in one trip. The worker's row is held FOR KEY SHARE and a stopped worker claims
-- nothing: release_worker takes that row FOR UPDATE first, so that a claim which a killed worker left in flight cannot
-- slip in behind the release. Task rows are taken with SKIP LOCKED, so a claim waits for nobody; the message of a task
-- that somebody holds is visible again at once.
create function pgflow_otp.claim_tasks(
  p_flow_slug text, p_queue_name text, p_worker_id uuid, p_visibility int, p_quantity int
) returns table (
  run_id uuid, step_slug text, task_index int, attempt int, max_attempts int, started_at timestamptz, timeout int,
  input jsonb, flow_input jsonb
)
language plpgsql volatile set search_path to '' as $$
declare
  v_read_ids bigint[];
  v_message_ids bigint[];
begin
  perform from pgflow.workers w
  where w.worker_id = p_worker_id and w.stopped_at is null and w.deprecated_at is null
  for key share;
  if not found then
    return;
  end if;

  select array_agg(m.msg_id) into v_read_ids
  from pgmq.read(queue_name => p_queue_name, vt => p_visibility, qty => coalesce(p_quantity, 0)) m;
  if v_read_ids is null then
    return;
  end if;

  select array_agg(locked.message_id) into v_message_ids
  from (
    select t.message_id
    from pgflow.step_tasks t
    where t.queue_name = p_queue_name and t.message_id = any (v_read_ids) and t.status = 'queued'
    order by t.run_id, t.step_slug, t.task_index
    for update skip locked
  ) locked;

  if coalesce(cardinality(v_message_ids), 0) < cardinality(v_read_ids) then
    perform pgflow.set_vt_batch(p_queue_name, held.ids, array_fill(0, array[cardinality(held.ids)]))
    from (
      select array_agg(t.message_id) as ids
      from pgflow.step_tasks t
      where t.queue_name = p_queue_name
        and t.message_id = any (v_read_ids)
        and t.message_id <> all (coalesce(v_message_ids, '{}'))
        and t.status = 'queued'
    ) held
    where held.ids is not null;
  end if;

  -- This query's snapshot is older than what start_tasks does in it: started_at is written down again as it sets it.
  return query
  select c.run_id, c.step_slug, c.task_index, c.attempts_count,
    coalesce(st.opt_max_attempts, f.opt_max_attempts), greatest(now(), t.queued_at), coalesce(st.opt_timeout, f.opt_timeout),
    c.input, c.flow_input
  from pgflow.start_tasks(p_flow_slug, v_message_ids, p_worker_id, p_queue_name) c
  join pgflow.step_tasks t on t.run_id = c.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
  join pgflow.steps st on st.flow_slug = c.flow_slug and st.step_slug = c.step_slug
  join pgflow.flows f on f.flow_slug = c.flow_slug;
end
$$;

-- Fail a task whatever attempts it has left. The count is raised only while fail_task decides, so that what is stored
-- says how often the handler really ran.
create function pgflow_otp._fail_for_good(p_run_id uuid, p_step_slug text, p_task_index int, p_error text)
returns text
language plpgsql volatile set search_path to '' as $$
declare
  v_attempts int;
  v_status text;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  perform from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug for update;
  select t.attempts_count into v_attempts
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index and t.status = 'started'
  for update;
  if found then
    update pgflow.step_tasks t
    set attempts_count = 2147483647
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
    perform pgflow.fail_task(p_run_id, p_step_slug, p_task_index, p_error);
    update pgflow.step_tasks t
    set attempts_count = v_attempts
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
  end if;
  select t.status into v_status
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
  return v_status;
end
$$;

-- Record the outcome of one attempt: 'completed', 'failed' (retried as the policy says), 'failed_for_good', 'released'
-- (handed back; costs no attempt), or 'crashed' (the same, but counted: the third time the task fails). The attempt is known by its claim, (worker, started_at): attempt numbers
-- repeat after a release. Returns the task's status, or 'overtaken' when another claim has it by now.
create function pgflow_otp.settle_task(
  p_run_id uuid, p_step_slug text, p_task_index int, p_worker_id uuid, p_started_at timestamptz,
  p_outcome text, p_output jsonb, p_error text
) returns text
language plpgsql volatile set search_path to '' as $$
declare
  v_task pgflow.step_tasks;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  perform from pgflow.step_states ss where ss.run_id = p_run_id and ss.step_slug = p_step_slug for update;
  select * into v_task
  from pgflow.step_tasks t
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
  for update;
  if not found then
    return 'gone';
  elsif v_task.last_worker_id is distinct from p_worker_id or v_task.started_at is distinct from p_started_at then
    return case when v_task.status in ('queued', 'started') then 'overtaken' else v_task.status end;
  elsif v_task.status <> 'started' then
    return v_task.status;
  end if;

  if v_task.permanently_stalled_at is not null and p_outcome in ('released', 'crashed') then
    -- Its message is archived already: nobody could claim it again.
    v_task.status := pgflow_otp._fail_for_good(
      p_run_id, p_step_slug, p_task_index,
      coalesce(p_error, format('Task stalled: no answer from its worker, requeued %s times', v_task.requeued_count)));
  elsif p_outcome = 'completed' then
    select c.status into v_task.status from pgflow.complete_task(p_run_id, p_step_slug, p_task_index, p_output) c;
  elsif p_outcome = 'failed' then
    select c.status into v_task.status from pgflow.fail_task(p_run_id, p_step_slug, p_task_index, p_error) c;
  elsif p_outcome = 'failed_for_good' then
    v_task.status := pgflow_otp._fail_for_good(p_run_id, p_step_slug, p_task_index, p_error);
  elsif p_outcome = 'crashed' and v_task.requeued_count >= 2 then
    v_task.status := pgflow_otp._fail_for_good(p_run_id, p_step_slug, p_task_index, p_error);
  elsif p_outcome in ('released', 'crashed') then
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        attempts_count = greatest(t.attempts_count - 1, 0),
        requeued_count = t.requeued_count + case when p_outcome = 'crashed' then 1 else 0 end,
        last_requeued_at = case when p_outcome = 'crashed' then now() else t.last_requeued_at end
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
    returning t.status into v_task.status;
    if v_task.message_id is not null then
      perform pgmq.set_vt(v_task.queue_name, v_task.message_id, 0);
    end if;
  else
    raise exception 'unknown outcome "%": use completed, failed, failed_for_good, released or crashed', p_outcome;
  end if;
  return v_task.status;
end
$$;

-- Hand back what a dead worker had claimed, at no cost of an attempt. A task that was running when its worker died
-- for the third time is left for fail_crashed_tasks. Rows that somebody else holds are skipped and counted in
-- remaining: call again until it is 0.
create function pgflow_otp.release_worker(p_worker_id uuid, out released int, out crashed int, out remaining int)
language plpgsql volatile set search_path to '' as $$
declare
  v_visible bigint;
begin
  perform from pgflow.workers w where w.worker_id = p_worker_id for update;
  update pgflow.workers w set stopped_at = clock_timestamp()
  where w.worker_id = p_worker_id and w.stopped_at is null;

  with held as materialized (
    select t.run_id, t.step_slug, t.task_index
    from pgflow.step_tasks t
    where t.last_worker_id = p_worker_id and t.status = 'started' and t.requeued_count < 2
      and t.permanently_stalled_at is null
    order by t.run_id, t.step_slug, t.task_index
    for update skip locked
  ), again as (
    update pgflow.step_tasks t
    set status = 'queued', started_at = null, last_worker_id = null,
        attempts_count = greatest(t.attempts_count - 1, 0),
        requeued_count = t.requeued_count + 1, last_requeued_at = now()
    from held h
    where t.run_id = h.run_id and t.step_slug = h.step_slug and t.task_index = h.task_index
    returning t.queue_name, t.message_id
  ), visible as (
    select v.msg_id
    from (
      select a.queue_name, array_agg(a.message_id) as ids
      from again a where a.message_id is not null group by a.queue_name
    ) q
    cross join lateral pgflow.set_vt_batch(q.queue_name, q.ids, array_fill(0, array[cardinality(q.ids)])) v
  )
  select (select count(*) from again), (select count(*) from visible) into released, v_visible;

  select
    count(*) filter (where t.requeued_count >= 2), count(*) filter (where t.requeued_count < 2)
  into crashed, remaining
  from pgflow.step_tasks t
  where t.last_worker_id = p_worker_id and t.status = 'started' and t.permanently_stalled_at is null;
end
$$;

create function pgflow_otp.fail_crashed_tasks(p_worker_id uuid) returns int
language plpgsql volatile set search_path to '' as $$
declare
  v_task record;
  v_failed int := 0;
begin
  for v_task in
    select t.run_id, t.step_slug, t.task_index, t.requeued_count
    from pgflow.step_tasks t
    where t.last_worker_id = p_worker_id and t.status = 'started' and t.requeued_count >= 2
    order by t.run_id, t.step_slug, t.task_index
  loop
    if pgflow_otp._fail_for_good(
      v_task.run_id, v_task.step_slug, v_task.task_index,
      format('The worker process died while this task ran, for the %s. time that the task was lost or stalled',
        v_task.requeued_count + 1)) = 'failed'
    then
      v_failed := v_failed + 1;
    end if;
  end loop;
  return v_failed;
end
$$;

-- True while the worker may go on; false when it was told to leave or its row is gone.
create function pgflow_otp.heartbeat(p_worker_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_alive boolean;
begin
  update pgflow.workers w
  set last_heartbeat_at = clock_timestamp()
  where w.worker_id = p_worker_id
  returning w.deprecated_at is null and w.stopped_at is null into v_alive;
  return coalesce(v_alive, false);
end
$$;

-- Workers of this runtime that have been silent for so many seconds and still hold tasks.
create function pgflow_otp.silent_workers(p_silence double precision) returns setof uuid
language sql stable set search_path to '' as $$
  select w.worker_id
  from pgflow.workers w
  where w.function_name like 'python:%'
    and w.last_heartbeat_at < clock_timestamp() - make_interval(secs => p_silence)
    and exists (
      select from pgflow.step_tasks t where t.last_worker_id = w.worker_id and t.status = 'started')
$$;
-- Removing what is no longer wanted, always by the queues stored with the tasks.

-- Delete one run with its exact messages, live and archived. False when there is no such run.
create function pgflow.delete_run(p_run_id uuid) returns boolean
language plpgsql volatile set search_path to '' as $$
declare
  v_queue record;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  if not found then
    return false;
  end if;

  with gone as (
    delete from pgflow.step_tasks t where t.run_id = p_run_id
    returning t.queue_name, t.message_id
  )
  select array_agg(q.queue_name) as names, array_agg(q.ids) as ids
  into v_queue
  from (
    select g.queue_name, jsonb_agg(g.message_id) as ids
    from gone g where g.message_id is not null group by g.queue_name
  ) q;
  for i in 1 .. coalesce(cardinality(v_queue.names), 0) loop
    perform pgflow_otp._delete_messages(
      v_queue.names[i], array(select e.id::bigint from jsonb_array_elements_text(v_queue.ids[i]) as e(id)));
  end loop;

  delete from pgflow.step_states ss where ss.run_id = p_run_id;
  delete from pgflow.runs r where r.run_id = p_run_id;
  return true;
end
$$;

create function pgflow_otp._delete_messages(p_queue_name text, p_message_ids bigint[]) returns void
language plpgsql volatile set search_path to '' as $$
declare
  v_table text;
  v_kind text;
begin
  foreach v_kind in array array['q', 'a'] loop
    v_table := pgmq.format_table_name(p_queue_name, v_kind);
    if to_regclass(format('pgmq.%I', v_table)) is not null then
      execute format('delete from pgmq.%I where msg_id = any ($1)', v_table) using p_message_ids;
    end if;
  end loop;
end
$$;

-- Remove finished runs, silent workers and archived messages older than the interval; of some flows, or of all when
-- the list is NULL or empty. Workers are not filtered by flow.
create function pgflow.prune_data_older_than(p_retention_interval interval, p_flow_slugs text[])
returns table (deleted_runs bigint, deleted_step_states bigint, deleted_step_tasks bigint, deleted_workers bigint)
language plpgsql volatile set search_path to '' as $$
declare
  v_cutoff constant timestamptz := now() - p_retention_interval;
  v_all constant boolean := coalesce(cardinality(p_flow_slugs), 0) = 0;
  v_runs uuid[];
  v_queue record;
begin
  -- Runs first, also those whose tasks only lose the reference to their worker.
  perform from pgflow.runs r
  where ((r.completed_at < v_cutoff or r.failed_at < v_cutoff) and (v_all or r.flow_slug = any (p_flow_slugs)))
    or exists (
      select from pgflow.step_tasks t
      join pgflow.workers w on w.worker_id = t.last_worker_id
      where t.run_id = r.run_id and w.last_heartbeat_at < v_cutoff
    )
  order by r.run_id
  for update;
  v_runs := array(
    select r.run_id
    from pgflow.runs r
    where (r.completed_at < v_cutoff or r.failed_at < v_cutoff)
      and (v_all or r.flow_slug = any (p_flow_slugs)));

  select count(*) into deleted_step_tasks from pgflow.step_tasks t where t.run_id = any (v_runs);
  for v_queue in
    with gone as (
      delete from pgflow.step_tasks t where t.run_id = any (v_runs)
      returning t.queue_name, t.message_id
    )
    select g.queue_name, array_agg(g.message_id) as ids
    from gone g
    where g.message_id is not null
    group by g.queue_name
  loop
    if to_regclass(format('pgmq.%I', pgmq.format_table_name(v_queue.queue_name, 'q'))) is not null then
      perform pgmq.delete(v_queue.queue_name, v_queue.ids);
    end if;
  end loop;
  delete from pgflow.step_states ss where ss.run_id = any (v_runs);
  get diagnostics deleted_step_states = row_count;
  delete from pgflow.runs r where r.run_id = any (v_runs);
  get diagnostics deleted_runs = row_count;
  delete from pgflow.workers w where w.last_heartbeat_at < v_cutoff;
  get diagnostics deleted_workers = row_count;

  for v_queue in
    select st.queue_name from pgflow.steps st where v_all or st.flow_slug = any (p_flow_slugs)
    union
    select lower(f.flow_slug) from pgflow.flows f
    where f.queue_mode = 'flow' and (v_all or f.flow_slug = any (p_flow_slugs))
  loop
    if to_regclass(format('pgmq.%I', pgmq.format_table_name(v_queue.queue_name, 'a'))) is not null then
      execute format(
        'delete from pgmq.%I where archived_at < $1', pgmq.format_table_name(v_queue.queue_name, 'a'))
      using v_cutoff;
    end if;
  end loop;
  return next;
end
$$;
comment on view pgflow.extensions_version is 'PgFlow version=6';

create table if not exists pgflow_otp.migrations (
  version int primary key,
  installed_at timestamptz not null default now()
);
insert into pgflow_otp.migrations (version) values (1);
