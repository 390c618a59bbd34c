"""Sharding rules: how each primitive may be split, as named factors. `table.RULES` holds them all."""
