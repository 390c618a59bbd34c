"""Inter-operator plans: a step cut into stages, each on devices of its own, and the schedule that they follow."""
