"""Bytes of units. In: a model and its units. Out: bytes, on real or on fake tensors."""
