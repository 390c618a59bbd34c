"""Pipelines over nodes that fail, by Oobleck's templates (Jang et al. 2023, arXiv 2309.08125).

In: the plan of a pipeline for each number of nodes, as numbers.
Out: pipelines that use every node, before and after failures, with what each node copies.
Imported by: pipeline.template_plans; api; report.
"""
