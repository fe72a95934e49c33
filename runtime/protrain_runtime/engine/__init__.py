"""Runs a program while a model computes. In: a `Program` and chunks. Out: moves, in time."""
