-- Other runtimes read the level of the schema from the comment of a view.
create or replace view pgflow.pgflow_version as select null::text as placeholder;
comment on view pgflow.pgflow_version is 'PgFlow version=2';
