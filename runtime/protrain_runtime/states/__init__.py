"""Model states in several tiers. In: a model and a layout. Out: chunks that can move."""
