-- Removing what is no longer wanted, always by the queues stored with the tasks.

-- Delete one run with its exact messages, live and archived. False when there is no such run.
create or replace function pgflow_otp.delete_run(p_run_id uuid) returns boolean
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

  perform pgflow_otp._drop_items(p_run_id, null);
  delete from pgflow.step_states ss where ss.run_id = p_run_id;
  delete from pgflow.runs r where r.run_id = p_run_id;
  return true;
end
$$;

create or replace function pgflow_otp._delete_messages(p_queue_name text, p_message_ids bigint[]) returns void
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
create or replace function pgflow_otp.prune(p_retention_interval interval, p_flow_slugs text[])
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
  if has_table_privilege('pgflow_otp.map_items', 'delete') then
    -- Those of deleted runs too: another runtime deletes without them.
    delete from pgflow_otp.map_items m
    where m.run_id = any (v_runs) or not exists (select from pgflow.runs r where r.run_id = m.run_id);
  end if;
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
    where to_jsonb(f) ->> 'queue_mode' is distinct from 'step' and (v_all or f.flow_slug = any (p_flow_slugs))
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
