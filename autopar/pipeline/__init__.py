"""Pipeline parallelism: a step cut into stages, placed on submeshes, run by a schedule.

In: a `Program`, devices, a schedule or `"auto"`.
Out: a `PipelinePlan`, and a function that runs it.
Imported by: report, api, verification, comparison, code_export, cli.
"""
