"""Define the plan as plain data, and read and write plan files.

In: the decisions of the planner, or a JSON file of any earlier version.
Out: `Plan`; JSON with migrations; the timeline of a step.
Imported by: every package below it.
"""
