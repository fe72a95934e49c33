"""What users would pick instead: each by its public API, on the same work, under the same limit."""
