"""What a user declares: flows, steps, jobs. Pure: no clock, no process, no database."""
