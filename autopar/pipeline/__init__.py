"""Plans over several submeshes: stages, the order in which they run their microbatches, and pictures of it."""
