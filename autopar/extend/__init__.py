"""Public names for extensions of autopar; these import paths stay the same when modules move.

In: nothing.
Out: `attention`, `collectives`, `compilers`, `consistency`, `hardware`, `indexes`, `replay`, `rules`, `schedules`, `solvers`: a module for each kind of extension.
Imported by: users.
"""
