"""The replay's rates and totals compared with measured tables, published runs, injected faults, XLA's estimate."""
