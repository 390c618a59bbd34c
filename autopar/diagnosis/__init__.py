"""Diagnose a hand-sharded step: find its unintended collectives and the sharding changes that help most.

In: a jitted step with its own shardings.
Out: a `Diagnosis`.
Imported by: cli.
"""
