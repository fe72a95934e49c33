"""Reasons for a plan. In: a solved problem. Out: reasons, limits and advice, as numbers."""
