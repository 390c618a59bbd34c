"""A step whose batch is split over time: which values hold the batch, what is summed, and the trace rewritten."""
