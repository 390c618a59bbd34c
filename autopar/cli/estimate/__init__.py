"""The subcommands of `autopar estimate`, which need no program of the user's.

In: a model's config, the size of a corpus, or a mesh.
Out: predicted times and memory, on devices that need not exist.
Imported by: cli.
"""
