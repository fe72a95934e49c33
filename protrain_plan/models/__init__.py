"""Where a model comes from: the shipped catalogue, a config.json, or the user's own factory.

`sources` and `batches` import torch, `presets` does not.
"""
