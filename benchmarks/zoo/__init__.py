"""Models that nobody here wrote, to plan, run and verify: from their libraries, with random weights.

`language`, `vision`, `speech`, `recurrent` and `graph_network` build train steps from a library's config; `small` has
configurations that run in a test, `real` those that are planned for GPUs, and `proof` holds these against XLA.
"""
