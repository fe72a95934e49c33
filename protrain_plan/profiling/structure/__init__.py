"""What a model is made of. In: a model and a batch. Out: units and what they read."""
