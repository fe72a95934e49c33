"""Benchmarks: analytic cases on which the planner is measured against its bound and baselines."""
