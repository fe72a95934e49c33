"""Forms of saved tensors. In: a block's forward. Out: kept, swapped, recomputed."""
