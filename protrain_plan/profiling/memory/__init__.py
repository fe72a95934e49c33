"""What a model's units hold. In: a model and its units. Out: bytes, on real or on fake tensors."""
