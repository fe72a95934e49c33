"""Bytes of units. In: a model and its units. Out: bytes, from real or fake tensors."""
