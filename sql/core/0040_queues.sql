-- Names of queues and messages of tasks. Only provisioning and deletion may list pgmq's queues; everything at run
-- time goes by the queue_name stored with a step or a task.

-- The spelling under which pgmq lists a queue, which may be older than the lowercase rule.
create or replace function pgflow._listed_queue_name(p_queue_name text) returns text
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

create or replace function pgflow._archive_task_message(p_run_id uuid, p_step_slug text, p_task_index int) returns void
language sql volatile set search_path to '' as $$
  select pgmq.archive(t.queue_name, t.message_id)
  from pgflow.step_tasks t
  where t.run_id = p_run_id
    and t.step_slug = p_step_slug
    and t.task_index = p_task_index
    and t.message_id is not null
$$;

-- Make messages visible so many seconds from now, each its own number, in one statement.
create or replace function pgflow.set_vt_batch(queue_name text, msg_ids bigint[], vt_offsets int[])
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

