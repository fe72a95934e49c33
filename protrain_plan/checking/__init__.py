"""Plans as code: what a plan promises, held against budgets, its profile and today's model.

plan_files       a plan with its profile, found in files
budgets          what each machine may be taken of, from pyproject.toml or budgets.yaml
plan_on_machine  the machines that a plan is checked on, their limits, and what it takes there
reestimate       the model as its source is today, in processes of their own with limits, several
                 at once (they import torch, and only when asked)
rules            small functions with codes, their verdicts, and the report of all on all plans;
                 their docstrings are what `--explain` prints
diffing          what changed between two profiles, and between two plans
"""
