"""`python -m pgflow_otp` is the command `pgflow-otp`."""

from pgflow_otp.cli import main

main()
