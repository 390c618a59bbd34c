"""The plan as plain data: it never imports a pass.

In: the decisions of the planner, or a JSON file of any earlier version.
Out: `Plan`; JSON with migrations; a step over time.
Imported by: every package below it.
"""
