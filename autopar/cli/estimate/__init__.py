"""Implement `autopar estimate`: estimates that need no user program.

In: a model's config, the size of a corpus, or a mesh.
Out: times and memory on devices that need not exist.
Imported by: cli.
"""
