"""Cache plans on disk.

In: a program, planning options, the sources of this package.
Out: a key, and the plan with this key.
Imported by: planner, api.
"""
