"""Users' alternatives: each by its public API, on the same work, under the same limit."""
