"""Keep parameters in host memory: stream them to the device in the order in which a program reads them (GeePS).

In: a function of parameters that are in pinned host memory, a budget of device memory for them.
Out: the function in pieces, before each of which the parameters of the next one are copied; a store's updates in host memory.
Imported by: users, through `autopar.stream_parameters`; versions.
"""
