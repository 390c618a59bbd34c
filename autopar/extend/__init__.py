"""Public names for those who extend autopar; what the guides teach stands here, wherever the code moves.

In: nothing.
Out: `attention`, `collectives`, `compilers`, `hardware`, `indexes`, `rules`, `schedules`, `solvers`: a module for each kind of extension.
Imported by: users.
"""
