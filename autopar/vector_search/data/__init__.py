"""What an index holds and takes: inputs, metrics, placement, files.

In: vectors and options.
Out: arrays on devices, files with digests.
Imported by: the packages of vector_search above it.
"""
