-- Starting steps: the event, one message per task, the tasks.

-- Announce steps whose state was just set to started, send their messages (one batch per queue and delay, in the order
-- of the arguments, then of the tasks) and create their tasks. The n-th id that comes back is the n-th message's.
-- A single task is the most frequent case, and has a way of its own.
create or replace function pgflow_otp._send_tasks(p_run_ids uuid[], p_step_slugs text[]) returns void
language plpgsql volatile as $$
declare
  v_batch record;
begin
  for i in 1 .. coalesce(cardinality(p_run_ids), 0) loop
    perform realtime.send(
      jsonb_build_object(
        'event_type', 'step:started', 'run_id', ss.run_id, 'step_slug', ss.step_slug, 'status', 'started',
        'started_at', ss.started_at, 'remaining_tasks', ss.remaining_tasks, 'remaining_deps', ss.remaining_deps),
      'step:' || ss.step_slug || ':started', 'pgflow:run:' || ss.run_id, false)
    from pgflow.step_states ss
    where ss.run_id = p_run_ids[i] and ss.step_slug = p_step_slugs[i];
  end loop;

  if cardinality(p_run_ids) = 1 then
    select ss.flow_slug, ss.initial_tasks, st.queue_name, coalesce(st.opt_start_delay, 0) as delay,
      st.step_type = 'map' as is_map
    into v_batch
    from pgflow.step_states ss
    join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
    where ss.run_id = p_run_ids[1] and ss.step_slug = p_step_slugs[1];
    if v_batch.initial_tasks = 1 then
      insert into pgflow.step_tasks (flow_slug, run_id, step_slug, message_id, queue_name)
      select v_batch.flow_slug, p_run_ids[1], p_step_slugs[1], s.msg_id, v_batch.queue_name
      from pgmq.send(
        v_batch.queue_name,
        jsonb_build_object(
          'flow_slug', v_batch.flow_slug, 'run_id', p_run_ids[1], 'step_slug', p_step_slugs[1], 'task_index', 0),
        v_batch.delay) as s(msg_id);
      if v_batch.is_map then
        perform pgflow_otp._store_items(
          p_run_ids[1], p_step_slugs[1], pgflow_otp._map_source(p_run_ids[1], p_step_slugs[1]));
      end if;
      return;
    end if;
  end if;

  for v_batch in
    select m.flow_slug, m.queue_name, m.delay, bool_or(m.is_map) as has_maps,
      array_agg(m.run_id) as run_ids, array_agg(m.step_slug) as step_slugs, array_agg(m.task_index) as task_indexes,
      array_agg(jsonb_build_object(
        'flow_slug', m.flow_slug, 'run_id', m.run_id, 'step_slug', m.step_slug, 'task_index', m.task_index)
      ) as messages
    from (
      select ss.flow_slug, st.queue_name, coalesce(st.opt_start_delay, 0) as delay, st.step_type = 'map' as is_map,
        k.run_id, k.step_slug, i.task_index
      from unnest(p_run_ids, p_step_slugs) with ordinality as k(run_id, step_slug, place)
      join pgflow.step_states ss on ss.run_id = k.run_id and ss.step_slug = k.step_slug
      join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
      cross join lateral generate_series(0, ss.initial_tasks - 1) as i(task_index)
      order by ss.flow_slug, st.queue_name, delay, k.place, i.task_index
    ) m
    group by m.flow_slug, m.queue_name, m.delay
  loop
    insert into pgflow.step_tasks (flow_slug, run_id, step_slug, task_index, message_id, queue_name)
    select v_batch.flow_slug, u.run_id, u.step_slug, u.task_index, u.message_id, v_batch.queue_name
    from unnest(
      v_batch.run_ids, v_batch.step_slugs, v_batch.task_indexes,
      array(select s.msg_id from pgmq.send_batch(v_batch.queue_name, v_batch.messages, v_batch.delay) as s(msg_id))
    ) as u(run_id, step_slug, task_index, message_id);

    if v_batch.has_maps then
      perform pgflow_otp._store_items(k.run_id, k.step_slug, pgflow_otp._map_source(k.run_id, k.step_slug))
      from unnest(p_run_ids, p_step_slugs) as k(run_id, step_slug)
      join pgflow.steps st on st.flow_slug = v_batch.flow_slug and st.step_slug = k.step_slug
      where st.step_type = 'map' and st.queue_name = v_batch.queue_name
        and coalesce(st.opt_start_delay, 0) = v_batch.delay;
    end if;
  end loop;
end
$$;
