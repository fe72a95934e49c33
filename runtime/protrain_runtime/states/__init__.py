"""Model states that live in several places. In: a model and a layout. Out: chunks that can move."""
