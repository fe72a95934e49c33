"""Sources of models: the catalogue, a config.json, or a factory. `presets` imports no torch."""
