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
