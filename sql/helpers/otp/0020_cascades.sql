-- What the functions of both schemas need when steps end. All of it runs under the lock of the run's row.

-- Steps that are ready, carry a condition, and do not meet it. A root step is judged by the run's input, any other by
-- the object of its completed dependencies (a skipped dependency is absent from it).
create or replace function pgflow_otp._unmet_conditions(p_run_id uuid)
returns table (step_slug text, step_index int, when_unmet text)
language plpgsql stable as $$
begin
  return query
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
    );
end
$$;

-- A skipped step satisfies its children; a map of nothing but a skipped step has no items.
create or replace function pgflow_otp._release_children_of_skipped(p_run_id uuid, p_flow_slug text, p_skipped text[])
returns void
language plpgsql volatile as $$
begin
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
  where cs.run_id = p_run_id and cs.step_slug = c.step_slug;
end
$$;

-- Conditions and taskless steps in turn until neither has anything left to say: a step that becomes ready because a
-- taskless one completed is judged too. False when the run failed.
create or replace function pgflow_otp._settle_cascades(p_run_id uuid) returns boolean
language plpgsql volatile as $$
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

-- Archive messages, one call for each queue. The ids have to come from tasks that were changed before.
create or replace function pgflow_otp._archive_messages(p_queue_names text[], p_message_ids bigint[]) returns void
language plpgsql volatile as $$
declare
  v_queue record;
begin
  for v_queue in
    select m.queue_name, array_agg(m.message_id) as message_ids
    from unnest(p_queue_names, p_message_ids) as m(queue_name, message_id)
    where m.message_id is not null
    group by m.queue_name
  loop
    perform pgmq.archive(v_queue.queue_name, v_queue.message_ids);
  end loop;
end
$$;

-- End every open task of a run (or of some of its steps) and archive their messages.
-- Tasks before messages, and tasks in the order of their key: every path that locks several does so.
create or replace function pgflow_otp._end_open_tasks(p_run_id uuid, p_step_slugs text[], p_status text) returns void
language plpgsql volatile as $$
declare
  v_queue_names text[];
  v_message_ids bigint[];
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
  )
  select array_agg(e.queue_name), array_agg(e.message_id) into v_queue_names, v_message_ids from ended e;
  if v_queue_names is not null then
    perform pgflow_otp._archive_messages(v_queue_names, v_message_ids);
  end if;
  perform pgflow_otp._drop_items(p_run_id, p_step_slugs);
end
$$;
