"""Plans over several submeshes: a step cut into stages, where they stand, and the order in which they run."""
