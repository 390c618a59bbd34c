"""Plans over stages: layers on submeshes, in microbatches, by a schedule."""
