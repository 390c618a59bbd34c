"""Several processes under `jax.distributed`: one plan, each host's part of the batch, faults by name."""
