"""A dim that is cut into equal parts becomes two dims, so that what stands beside the parts can be split."""
