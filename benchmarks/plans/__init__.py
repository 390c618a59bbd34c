"""Plans beside sharding by hand, judged by XLA: models, recipes, settings, and what comes of them."""
