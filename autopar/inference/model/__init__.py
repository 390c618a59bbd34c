"""Load decoder-only models: configuration, sharded weights, tokenizer, forward pass.

In: a folder as Hugging Face writes it.
Out: a `Decoder`, and its parameters on the devices.
Imported by: the packages of inference above it.
"""
