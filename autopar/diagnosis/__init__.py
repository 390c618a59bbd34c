"""A step sharded by hand: its unintended collectives and the changes worth making.

In: a jitted step with its own shardings.
Out: a `Diagnosis`.
Imported by: cli.
"""
