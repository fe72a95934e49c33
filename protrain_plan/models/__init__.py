"""Where a model comes from: the shipped catalogue, a config.json, or the user's own factory.

`presets` imports no torch; all others do.
"""
