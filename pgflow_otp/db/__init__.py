"""The database: one thin function per SQL function, the installer, and the embedded server."""
