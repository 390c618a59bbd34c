"""Nodes that each device runs its own part of, where XLA's partitioner cannot or will not do what the rule says:
how a region is run (`region`), the parts by primitive (`table`), and the parts themselves."""
