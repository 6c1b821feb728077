-- Registering whole flows: routes, shapes, comparison, creation, deletion.

-- The queue of one step of a flow with per-step queues. Readable if it fits, else by index; never cut, never hashed.
create or replace function pgflow._resolve_step_queue_name(p_flow_slug text, p_step_slug text, p_step_index int) returns text
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

create or replace function pgflow._derive_queue_routes(p_flow_slug text, p_shape jsonb, p_queue_mode text) returns jsonb
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
create or replace function pgflow._assert_step_queue_available(p_flow_slug text, p_queue_name text) returns boolean
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

create or replace function pgflow._get_flow_shape(p_flow_slug text) returns jsonb
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

create or replace function pgflow._compare_flow_shapes(p_local jsonb, p_db jsonb) returns text[]
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

create or replace function pgflow._create_flow_from_shape(p_flow_slug text, p_shape jsonb, p_queue_mode text default 'flow')
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

create or replace function pgflow.delete_flow_and_data(p_flow_slug text) returns void
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

  perform pgflow_otp._drop_items(r.run_id, null) from pgflow.runs r where r.flow_slug = p_flow_slug;
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
create or replace function pgflow.ensure_flow_compiled(flow_slug text, shape jsonb, queue_mode text, route_map jsonb default null)
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

create or replace function pgflow.ensure_flow_compiled(flow_slug text, shape jsonb) returns jsonb
language sql volatile set search_path to '' as $$
  select pgflow.ensure_flow_compiled(
    ensure_flow_compiled.flow_slug, ensure_flow_compiled.shape, 'flow'::text, null::jsonb)
$$;
