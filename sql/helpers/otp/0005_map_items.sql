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

create or replace function pgflow_otp._map_item(p_run_id uuid, p_step_slug text, p_task_index int) returns jsonb
language plpgsql stable as $$
declare
  v_item jsonb;
begin
  if has_table_privilege('pgflow_otp.map_items', 'select') then
    select m.item into v_item
    from pgflow_otp.map_items m
    where m.run_id = p_run_id and m.step_slug = p_step_slug and m.task_index = p_task_index;
    if found then
      return v_item;
    end if;
  end if;
  return pgflow_otp._map_source(p_run_id, p_step_slug) -> p_task_index;
end
$$;

create or replace function pgflow_otp._store_items(p_run_id uuid, p_step_slug text) returns void
language plpgsql volatile as $$
declare
  v_items constant jsonb := pgflow_otp._map_source(p_run_id, p_step_slug);
begin
  if has_table_privilege('pgflow_otp.map_items', 'insert')
    and (jsonb_array_length(v_items) > 50 or pg_column_size(v_items) > 2000)
  then
    insert into pgflow_otp.map_items (run_id, step_slug, task_index, item)
    select p_run_id, p_step_slug, e.place - 1, e.item
    from jsonb_array_elements(v_items) with ordinality as e(item, place)
    on conflict on constraint map_items_pkey do nothing;
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
