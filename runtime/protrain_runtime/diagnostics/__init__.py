"""Diagnostics for users. In: a model, a plan, a step. Out: refusals and recordings."""
