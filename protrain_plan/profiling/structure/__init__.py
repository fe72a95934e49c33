"""The structure of a model. In: a model and a batch. Out: units and what they read."""
