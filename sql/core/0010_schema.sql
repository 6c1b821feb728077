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
