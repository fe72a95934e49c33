"""Saved tensors in another form. In: a block's forward. Out: kept, swapped, recomputed."""
