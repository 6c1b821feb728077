-- Recording how attempts ended.

-- Fail a task whatever attempts it has left. The count is raised only while fail_task decides, so that what is stored
-- says how often the handler really ran.
create or replace function pgflow_otp._fail_for_good(p_run_id uuid, p_step_slug text, p_task_index int, p_error text)
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
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index
    and t.status is not distinct from 'started'
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

-- Whole seconds from now until a time; 0 or less when it has passed.
create or replace function pgflow_otp._seconds_until(p_time timestamptz) returns int
language plpgsql volatile as $$
begin
  return floor(extract(epoch from p_time - clock_timestamp()))::int;
end
$$;

-- Record the outcome of one attempt: 'completed', 'failed' (retried as the policy says), 'failed_for_good', 'released'
-- (handed back; costs no attempt), or 'crashed' (the same, but counted: the third time the task fails). The attempt is
-- known by its claim, (worker, started_at): attempt numbers repeat after a release. Returns the task's status, or
-- 'overtaken' when another claim has it by now, or 'gone'.
create or replace function pgflow_otp.settle_task(
  p_run_id uuid, p_step_slug text, p_task_index int, p_worker_id uuid, p_started_at timestamptz,
  p_outcome text, p_output jsonb, p_error text
) returns text
language plpgsql volatile set search_path to '' as $$
declare
  v_run_status text;
  v_task pgflow.step_tasks;
begin
  if p_outcome is null or p_outcome not in ('completed', 'failed', 'failed_for_good', 'released', 'crashed') then
    raise exception 'unknown outcome "%": use completed, failed, failed_for_good, released or crashed', p_outcome;
  end if;
  select r.status into v_run_status from pgflow.runs r where r.run_id = p_run_id for update;
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
    return pgflow_otp._fail_for_good(
      p_run_id, p_step_slug, p_task_index,
      coalesce(p_error, format('Task stalled: no answer from its worker, requeued %s times', v_task.requeued_count)));
  elsif p_outcome = 'completed' and v_run_status = 'failed' then
    perform pgflow._archive_task_message(p_run_id, p_step_slug, p_task_index);
    return v_task.status;
  elsif p_outcome = 'completed' then
    perform pgflow_otp._complete_task(p_run_id, p_step_slug, p_task_index, p_output);
    return (
      select t.status from pgflow.step_tasks t
      where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index);
  elsif p_outcome = 'failed' then
    return (select c.status from pgflow.fail_task(p_run_id, p_step_slug, p_task_index, p_error) c);
  elsif p_outcome = 'failed_for_good' or (p_outcome = 'crashed' and v_task.requeued_count >= 2) then
    return pgflow_otp._fail_for_good(p_run_id, p_step_slug, p_task_index, p_error);
  end if;

  update pgflow.step_tasks t
  set status = 'queued', started_at = null, last_worker_id = null,
      attempts_count = greatest(t.attempts_count - 1, 0),
      requeued_count = t.requeued_count + case when p_outcome = 'crashed' then 1 else 0 end,
      last_requeued_at = case when p_outcome = 'crashed' then now() else t.last_requeued_at end
  where t.run_id = p_run_id and t.step_slug = p_step_slug and t.task_index = p_task_index;
  if v_task.message_id is not null then
    -- Messages are read by the time they became visible: this one has its old place again.
    perform pgmq.set_vt(v_task.queue_name, v_task.message_id, pgflow_otp._seconds_until(v_task.queued_at));
  end if;
  return 'queued';
end
$$;

-- Record the outcomes of many attempts of one worker, of any number of runs, in one statement: the same results and events
-- as if each were given to settle_task, in the order given (per run; runs do not know of each other).
--
-- Returns a row for each item, by its position from 1: the status settle_task would return; 'busy' when another
-- transaction holds the run (nothing was done: give it again); 'refused' with the reason when the item cannot be stored
-- (it alone; the rest is settled). At least one run is always waited for and settled, so repeating comes to an end; no
-- run is waited for while another is held. Outputs are JSON as text: of 'completed' items only.
create or replace function pgflow_otp.settle_tasks(
  p_worker_id uuid, p_run_ids uuid[], p_step_slugs text[], p_task_indexes int[], p_started_ats timestamptz[],
  p_outcomes text[], p_outputs text[], p_errors text[]
) returns table (place int, status text, reason text)
language plpgsql volatile
set search_path to '' set plan_cache_mode to force_generic_plan
set enable_seqscan to off set enable_hashjoin to off set enable_mergejoin to off set join_collapse_limit to 1
set jit to off as $$
declare
  v_count constant int := coalesce(cardinality(p_run_ids), 0);
  v_locked uuid[];
  v_statuses text[] := array_fill(null::text, array[v_count]);
  v_reasons text[] := array_fill(null::text, array[v_count]);
  v_wave record;
  v_places int[];
  v_place int;
  v_state text;
  v_message text;
begin
  if not (
    cardinality(p_step_slugs) = v_count and cardinality(p_task_indexes) = v_count
    and cardinality(p_started_ats) = v_count and cardinality(p_outcomes) = v_count
    and cardinality(p_outputs) = v_count and cardinality(p_errors) = v_count
  ) then
    raise exception using
      errcode = 'invalid_parameter_value', message = 'settle_tasks: all arrays need one element for each item';
  end if;

  v_locked := array(
    select r.run_id from pgflow.runs r where r.run_id = any (p_run_ids) order by r.run_id for update skip locked);
  if v_locked = '{}' then
    v_locked := array(
      select r.run_id from pgflow.runs r where r.run_id = any (p_run_ids) order by r.run_id limit 1 for update);
    v_locked := v_locked || array(
      select r.run_id from pgflow.runs r
      where r.run_id = any (p_run_ids) and r.run_id <> all (v_locked)
      order by r.run_id for update skip locked);
  end if;

  -- Waves: of each run the next items that can go together, which are completions of one step. One task twice cannot.
  for v_wave in
    select w.wave, array_agg(w.place order by w.place) as places,
      array_agg(w.place order by w.place) filter (where w.outcome = 'completed') as completed,
      array_agg(w.place order by w.place) filter (where w.outcome = 'failed') as failed
    from (
      select b.place, b.outcome, sum(b.begins) over (partition by b.run_id order by b.place) as wave
      from (
        select i.place, i.run_id, i.outcome,
          case
            when i.outcome is distinct from 'completed'
              or lag(i.outcome) over r is distinct from 'completed'
              or lag(i.step_slug) over r is distinct from i.step_slug
              or row_number() over (partition by i.run_id, i.step_slug, i.task_index order by i.place) > 1
            then 1
            else 0
          end as begins
        from unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outcomes) with ordinality
          as i(run_id, step_slug, task_index, outcome, place)
        where i.run_id = any (v_locked)
        window r as (partition by i.run_id order by i.place)
      ) b
    ) w
    group by w.wave
    order by w.wave
  loop
    begin
      v_places := v_wave.places;
      if cardinality(v_wave.completed) > 1 then
        perform pgflow_otp._complete_tasks(
          array(select p_run_ids[c.place] from unnest(v_wave.completed) with ordinality c(place, n) order by c.n),
          array(select p_step_slugs[c.place] from unnest(v_wave.completed) with ordinality c(place, n) order by c.n),
          array(select p_task_indexes[c.place] from unnest(v_wave.completed) with ordinality c(place, n) order by c.n),
          array(select p_outputs[c.place]::jsonb from unnest(v_wave.completed) with ordinality c(place, n) order by c.n),
          p_worker_id,
          array(select p_started_ats[c.place] from unnest(v_wave.completed) with ordinality c(place, n) order by c.n));
        v_places := array(select u.place from unnest(v_places) as u(place) where u.place <> all (v_wave.completed));
      end if;
      if cardinality(v_wave.failed) > 1 then
        v_wave.failed := pgflow_otp._retry_tasks(
          p_worker_id, v_wave.failed, p_run_ids, p_step_slugs, p_task_indexes, p_started_ats, p_errors);
        foreach v_place in array v_wave.failed loop
          v_statuses[v_place] := 'queued';
        end loop;
        v_places := array(select u.place from unnest(v_places) as u(place) where u.place <> all (v_wave.failed));
      end if;
      foreach v_place in array v_places loop
        v_statuses[v_place] := pgflow_otp.settle_task(
          p_run_ids[v_place], p_step_slugs[v_place], p_task_indexes[v_place], p_worker_id, p_started_ats[v_place],
          p_outcomes[v_place], p_outputs[v_place]::jsonb, p_errors[v_place]);
      end loop;
    exception
      -- Not an item's fault: whoever called tries again.
      when transaction_rollback or insufficient_resources or lock_not_available or operator_intervention
        or system_error or internal_error
      then
        raise;
      when others then
        -- One of them is bad. What the wave did is undone, and its items go one by one.
        foreach v_place in array v_wave.places loop
          begin
            v_statuses[v_place] := pgflow_otp.settle_task(
              p_run_ids[v_place], p_step_slugs[v_place], p_task_indexes[v_place], p_worker_id, p_started_ats[v_place],
              p_outcomes[v_place], p_outputs[v_place]::jsonb, p_errors[v_place]);
          exception
            when transaction_rollback or insufficient_resources or lock_not_available or operator_intervention
              or system_error or internal_error
            then
              raise;
            when others then
              get stacked diagnostics v_state = returned_sqlstate, v_message = message_text;
              v_statuses[v_place] := 'refused';
              v_reasons[v_place] := v_state || ': ' || v_message;
          end;
        end loop;
    end;
  end loop;

  -- What the waves did not note down is read from the tasks: completions, and what could not be completed any more.
  return query
  select i.place::int,
    case
      when v_statuses[i.place] is not null then v_statuses[i.place]
      when r.run_id is not null and r.run_id <> all (v_locked) then 'busy'
      when t.run_id is null then 'gone'
      when t.status in ('queued', 'started')
        and (t.last_worker_id is distinct from p_worker_id or t.started_at is distinct from i.started_at)
      then 'overtaken'
      else t.status
    end,
    v_reasons[i.place]
  from unnest(p_run_ids, p_step_slugs, p_task_indexes, p_started_ats) with ordinality
    as i(run_id, step_slug, task_index, started_at, place)
  left join pgflow.runs r on r.run_id = i.run_id
  left join pgflow.step_tasks t
    on t.run_id = i.run_id and t.step_slug = i.step_slug and t.task_index = i.task_index
  order by i.place;
end
$$;

-- Put failed attempts back into the queue, those that have attempts left; returns their places. Of each run one item, and
-- the caller holds the rows of the runs.
create or replace function pgflow_otp._retry_tasks(
  p_worker_id uuid, p_places int[], p_run_ids uuid[], p_step_slugs text[], p_task_indexes int[],
  p_started_ats timestamptz[], p_errors text[]
) returns int[]
language plpgsql volatile as $$
declare
  v_retried int[];
  v_queue record;
begin
  for v_queue in
    with retried as (
      update pgflow.step_tasks t
      set status = 'queued', started_at = null, error_message = i.error_message
      from (
        select u.place, p_run_ids[u.place] as run_id, p_step_slugs[u.place] as step_slug,
          p_task_indexes[u.place] as task_index, p_started_ats[u.place] as started_at, p_errors[u.place] as error_message
        from unnest(p_places) as u(place)
        offset 0
      ) i
      join pgflow.runs r on r.run_id = i.run_id and r.status is not distinct from 'started'
      join pgflow.step_states ss on ss.run_id = i.run_id and ss.step_slug = i.step_slug
        and ss.status is not distinct from 'started'
      join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
      join pgflow.flows f on f.flow_slug = ss.flow_slug
      where t.run_id = i.run_id and t.step_slug = i.step_slug and t.task_index = i.task_index
        -- written so that no index on these columns is taken for the key's
        and t.status is not distinct from 'started'
        and t.last_worker_id is not distinct from p_worker_id
        and t.started_at is not distinct from i.started_at
        and t.permanently_stalled_at is null
        and t.attempts_count < coalesce(st.opt_max_attempts, f.opt_max_attempts)
      returning i.place, t.queue_name, t.message_id,
        pgflow.calculate_retry_delay(coalesce(st.opt_base_delay, f.opt_base_delay), t.attempts_count) as delay
    )
    select q.queue_name, array_agg(q.place) as places, array_agg(q.message_id) as message_ids, array_agg(q.delay) as delays
    from retried q
    group by q.queue_name
  loop
    perform pgflow.set_vt_batch(v_queue.queue_name, v_queue.message_ids, v_queue.delays);
    v_retried := v_retried || v_queue.places;
  end loop;
  return coalesce(v_retried, '{}');
end
$$;
