"""A trace cut into programs of stages.

In: a trace, the stage of each layer.
Out: a forward, backward, weight and update program for each stage.
Imported by: pipeline.search, pipeline.run.
"""
