"""Plans as code: what a plan promises, held against budgets, its profile and today's model.

cases         a plan with its profile, found in files
budgets       what each machine may be taken of, from pyproject.toml or budgets.yaml
targets       the machines that a plan is checked on, and their limits
reestimating  the model as its source is today (imports torch, and only when asked)
predicting    the bytes and seconds of a plan's decisions for a profile
growing       what changed between two profiles, unit by unit
rules         small functions with codes; their docstrings are what `--explain` prints
running       all rules on all plans: a report
formats       the report for people and for programs
diffing       what changed between two plans
exporting     the nearest configuration of another tool
schemas       the records as JSON Schema
"""
