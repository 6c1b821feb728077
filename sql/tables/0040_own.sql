-- Schema pgflow_otp: what only this runtime adds, and the private functions of the core, so that pgflow never holds a
-- name of ours. Run on a database whose pgflow another runtime installed, too.
create schema if not exists pgflow_otp;
-- The core's functions run with their caller's rights and call private ones here: whoever is granted pgflow has to
-- reach them. They can do nothing that the caller could not.
grant usage on schema pgflow_otp to public;

-- The version of all this; the highest row counts. owns_core is false beside a pgflow of another runtime.
create table pgflow_otp.migrations (
  version int primary key,
  installed_at timestamptz not null default now(),
  breaking boolean not null default false,
  owns_core boolean not null default true
);

-- Elements of large maps, one row per task until it is final. Without foreign keys, which would cost more than the rows:
-- a row too many is only a copy of what the array holds. A role without rights on this table works with the array.
create table pgflow_otp.map_items (
  run_id uuid not null,
  step_slug text not null,
  task_index int not null,
  item jsonb not null,
  constraint map_items_pkey primary key (run_id, step_slug, task_index)
);

-- What was done to runs by hand: who cancelled or retried which, when and why.
create table pgflow_otp.run_actions (
  run_id uuid not null,
  action text not null,
  reason text,
  done_by text not null default current_user,
  done_at timestamptz not null default now(),
  constraint action_is_valid check (action in ('cancelled', 'retried'))
);
create index idx_run_actions_run_id on pgflow_otp.run_actions (run_id);

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
