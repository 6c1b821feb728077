"""The processes of this engine: root, workers, recovery, starter."""
