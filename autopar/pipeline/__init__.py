"""Run a step as a pipeline: partition it into stages on submeshes, and run them by a schedule.

In: a `Program`, devices, a schedule or `"auto"`.
Out: a `PipelinePlan`, and a function that runs it.
Imported by: report, api, verification, comparison, code_export, inference, cli.
"""
