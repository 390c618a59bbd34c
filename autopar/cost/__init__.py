"""What a choice costs: the hardware profile, compute, collectives, resharding, memory."""
