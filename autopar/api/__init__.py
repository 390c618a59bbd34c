"""What users call: `parallelize`, `plan`, measured step reports.

In: a user's step and options.
Out: a step that runs by its plan; plans; reports.
Imported by: inference, vector_search, verification, comparison, cli.
"""
