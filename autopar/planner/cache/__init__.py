"""Cache plans on disk.

In: a program, options, the sources of this package.
Out: a key, and the plan stored under it.
Imported by: planner, api.
"""
