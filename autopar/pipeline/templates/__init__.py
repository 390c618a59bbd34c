"""Pipelines over nodes that fail: templates of several sizes, how they cover the nodes that are left, and what state is copied.

In: the plan of a pipeline for each number of nodes, as numbers. Out: pipelines that use every node, before and after failures.
The method is Oobleck's (Jang et al. 2023, arXiv 2309.08125). Imported by: `pipeline.template_plans`, api.
"""
