"""Everything that planner and runtime agree on, importable without PyTorch.

`records` are the YAML files, `program` is the meaning of a plan: its moves and their bytes. Below
both: errors, escaped text and units.
"""

__version__ = "0.1.0"
