-- Declaring flows step by step.

create or replace function pgflow.create_flow(
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

create or replace function pgflow.add_step(
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
