"""Compare plans with hand-written sharding, by XLA's estimates: models, recipes, settings, results."""
