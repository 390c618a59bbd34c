"""Compare plans of one step: across hardware, with a committed plan, with the runner-up of a decision.

In: a step, kinds and numbers of devices.
Out: tables and a verdict.
Imported by: cli.
"""
