"""Provide the public functions: `parallelize`, `plan`, measured step reports.

In: a user's step and options.
Out: a step that runs sharded by its plan; plans; reports.
Imported by: inference, placement, vector_search, verification, comparison, cli.
"""
