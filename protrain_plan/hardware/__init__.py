"""Speeds and sizes of machines. `probe` measures this one (and imports torch)."""
