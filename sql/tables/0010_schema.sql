-- Schema pgflow: what every runtime shares, tables, functions and literal texts.
create schema pgflow;
revoke all on schema pgflow from public;
