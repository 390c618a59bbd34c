"""Training that survives failures, measured."""
