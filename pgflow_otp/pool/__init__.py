"""Isolation of handlers: processes that may crash, hang or leak without harm to anything else."""
