"""Decoders by family: configuration, weights, tokenizer, one forward pass.

In: a Hugging Face folder.
Out: a `Decoder`, its parameters on devices.
Imported by: the packages of inference above it.
"""
