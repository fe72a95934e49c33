"""Everything that planner and runtime share, importable without PyTorch.

`records` are the YAML files, `program` is a plan's meaning: moves and their bytes. Below both:
errors, escaped text and units.
"""

__version__ = "0.1.0"
