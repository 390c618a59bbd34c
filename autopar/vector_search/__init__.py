"""Vector search: indexes as compiled programs, laid over the mesh by the planner."""
