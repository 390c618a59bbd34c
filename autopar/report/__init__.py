"""Explain a plan: text, HTML, JSON, diff. This package never plans.

In: a `Plan` or `PipelinePlan`.
Out: text, one HTML page, rows as data.
Imported by: api, inference, vector_search, verification, comparison, cli.
"""
