"""A database that tests use one after the other: emptied after each, known to be as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

EMPTY = """
do $$
declare
  v_table text;
begin
  -- By what there is, not by what is listed: the two differ by case, or because a test wants it so.
  for v_table in
    select c.oid::regclass::text from pg_catalog.pg_class c
    where c.relnamespace = 'pgmq'::regnamespace and c.relkind = 'r' and c.relname ~ '^[qa]_'
  loop
    execute format('drop table %s', v_table);
  end loop;
  delete from pgmq.notify_insert_throttle;
  delete from pgmq.meta;
  foreach v_table in array array[
    'step_tasks', 'step_states', 'runs', 'deps', 'steps', 'flows', 'worker_functions', 'workers'] loop
    execute format('delete from pgflow.%I', v_table);
  end loop;
  delete from pgflow_otp.map_items;
  delete from pgflow_otp.run_actions;
  delete from realtime.messages;
end
$$
"""

# Each change of a definition writes its row of the catalogue anew, under another transaction.
FINGERPRINT = """
select md5(concat(
  (select string_agg(concat(n.oid, n.xmin), ' ' order by n.oid) from pg_namespace n where n.nspname !~ '^pg_'),
  (select string_agg(concat(c.oid, c.xmin), ' ' order by c.oid) from pg_class c where c.oid >= 16384
   and c.relnamespace not in (select n.oid from pg_namespace n where n.nspname ~ '^pg_')),
  (select string_agg(concat(a.attrelid, a.attnum, a.xmin), ' ' order by a.attrelid, a.attnum)
   from pg_attribute a join pg_class c on c.oid = a.attrelid and c.relnamespace = 'pgflow'::regnamespace),
  (select string_agg(concat(p.oid, p.xmin), ' ' order by p.oid) from pg_proc p where p.oid >= 16384),
  (select string_agg(concat(c.oid, c.xmin), ' ' order by c.oid) from pg_constraint c where c.oid >= 16384),
  (select string_agg(concat(t.oid, t.xmin), ' ' order by t.oid) from pg_trigger t where t.oid >= 16384),
  (select string_agg(concat(e.oid, e.xmin), ' ' order by e.oid) from pg_extension e),
  (select string_agg(s::text, ' ' order by s::text) from pg_db_role_setting s),
  (select string_agg(m::text, ' ' order by m.version) from pgflow_otp.migrations m)))
"""


def empty(connection: psycopg.Connection[Any]) -> None:
    """Delete everything that is not a definition."""
    connection.execute(EMPTY.encode())


def fingerprint(connection: psycopg.Connection[Any]) -> str:
    """What tells that a database is defined as it was."""
    row = connection.execute(FINGERPRINT.encode()).fetchone()
    assert row
    return str(row[0])
