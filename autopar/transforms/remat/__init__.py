"""Computing forward values again in the backward pass, so that they are not in memory between the two."""
