"""Plans of one step beside each other: by hardware, by number of devices, against a committed plan.

In: a step, kinds and numbers of devices.
Out: tables and a verdict.
Imported by: cli.
"""
