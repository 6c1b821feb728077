-- The elements of large maps are kept beside their tasks, so that a claim of one does not take the whole array apart.
-- Few and small elements are read from the array, and so is everything where the role may not use the table.

-- The array whose elements a map step works on.
create or replace function pgflow_otp._map_source(p_run_id uuid, p_step_slug text) returns jsonb
language plpgsql stable as $$
declare
  v_items jsonb;
begin
  select case
    when st.deps_count = 0 then (select r.input from pgflow.runs r where r.run_id = ss.run_id)
    else (
      select ds.output
      from pgflow.deps d
      join pgflow.step_states ds on ds.run_id = ss.run_id and ds.step_slug = d.dep_slug
      where d.flow_slug = ss.flow_slug and d.step_slug = ss.step_slug and ds.status = 'completed'
    )
  end into v_items
  from pgflow.step_states ss
  join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
  where ss.run_id = p_run_id and ss.step_slug = p_step_slug;
  return v_items;
end
$$;

-- The element of one task. Where elements are missing that should be kept (a runtime without this table has started the
-- step), the first claim keeps them.
create or replace function pgflow_otp._map_item(p_run_id uuid, p_step_slug text, p_task_index int) returns jsonb
language plpgsql volatile as $$
declare
  v_item jsonb;
  v_items jsonb;
begin
  if has_table_privilege('pgflow_otp.map_items', 'select') then
    select m.item into v_item
    from pgflow_otp.map_items m
    where m.run_id = p_run_id and m.step_slug = p_step_slug and m.task_index = p_task_index;
    if found then
      return v_item;
    end if;
  end if;
  v_items := pgflow_otp._map_source(p_run_id, p_step_slug);
  perform pgflow_otp._restore_items(p_run_id, p_step_slug, v_items);
  return v_items -> p_task_index;
end
$$;

-- Keep the elements of a step that starts, when they are many or large. Returns whether they are.
create or replace function pgflow_otp._store_items(p_run_id uuid, p_step_slug text, p_items jsonb) returns boolean
language plpgsql volatile as $$
begin
  if jsonb_typeof(p_items) = 'array'
    and (pg_column_size(p_items) > 2000 or (select jsonb_array_length(p_items)) > 50)
    and has_table_privilege('pgflow_otp.map_items', 'insert')
  then
    insert into pgflow_otp.map_items (run_id, step_slug, task_index, item)
    select p_run_id, p_step_slug, e.place - 1, e.item
    from jsonb_array_elements(p_items) with ordinality as e(item, place)
    on conflict on constraint map_items_pkey do nothing;
    return true;
  end if;
  return false;
end
$$;

-- Keep the elements of a step that goes on: those of its unfinished tasks.
create or replace function pgflow_otp._restore_items(p_run_id uuid, p_step_slug text, p_items jsonb) returns void
language plpgsql volatile as $$
begin
  if pgflow_otp._store_items(p_run_id, p_step_slug, p_items) then
    perform pgflow_otp._drop_items(array_agg(t.run_id), array_agg(t.step_slug), array_agg(t.task_index))
    from pgflow.step_tasks t
    where t.run_id = p_run_id and t.step_slug = p_step_slug and t.status = 'completed';
  end if;
end
$$;

-- Forget the elements of a run, or of some of its steps.
create or replace function pgflow_otp._drop_items(p_run_id uuid, p_step_slugs text[]) returns void
language plpgsql volatile as $$
begin
  if has_table_privilege('pgflow_otp.map_items', 'delete') then
    delete from pgflow_otp.map_items m
    where m.run_id = p_run_id and (p_step_slugs is null or m.step_slug = any (p_step_slugs));
  end if;
end
$$;

-- Forget the elements of single tasks.
create or replace function pgflow_otp._drop_items(p_run_ids uuid[], p_step_slugs text[], p_task_indexes int[])
returns void
language plpgsql volatile as $$
begin
  if has_table_privilege('pgflow_otp.map_items', 'delete') then
    delete from pgflow_otp.map_items m
    using unnest(p_run_ids, p_step_slugs, p_task_indexes) as k(run_id, step_slug, task_index)
    where m.run_id = k.run_id and m.step_slug = k.step_slug and m.task_index = k.task_index;
  end if;
end
$$;
