"""Cut a trace into the programs of pipeline stages.

In: a trace, the stage of each layer.
Out: a forward, backward, weight and update program for each stage.
Imported by: pipeline.search, pipeline.run.
"""
