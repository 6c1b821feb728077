comment on view pgflow.extensions_version is 'PgFlow version=6';
