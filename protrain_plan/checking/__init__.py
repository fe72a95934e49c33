"""Plans as code: what a plan promises, for review and for other tools.

budgets       what each machine may be taken of, from pyproject.toml or budgets.yaml
predicting    the bytes and seconds of a plan's decisions for a profile
diffing       what changed between two plans
exporting     the nearest configuration of another tool
schemas       the records as JSON Schema
formats       all of it for people and for programs
"""
