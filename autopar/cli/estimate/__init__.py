"""The commands under `autopar estimate`: what needs no program of the user's.

In: a model's config, the size of a corpus, or a mesh.
Out: times and memory on devices that need not exist.
Imported by: cli.
"""
