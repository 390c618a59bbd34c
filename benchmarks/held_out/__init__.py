"""Check predictions on models that the planner was not developed with.

`draw` draws configurations from a seed, `build` builds them from their libraries, `seed` takes the seed from the
planner's newest commit, `tuned` lists the models that were looked into, `parts` measures, and `page` has the gates.
"""
