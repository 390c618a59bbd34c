"""Measure versioned stores: calls, stragglers, convergence under consistency policies."""
