"""Models from their own libraries, with random weights, to plan, run and verify.

`language`, `vision`, `speech`, `recurrent` and `graph_network` build train steps from a library's config; `small` has
configurations that run in a test, `real` has those that are planned for GPUs, and `proof` compares these with XLA.
"""
