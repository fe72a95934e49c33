"""What a machine offers. `probe` measures this one (and imports torch)."""
