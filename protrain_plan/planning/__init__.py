"""From a profile and budgets to the fastest plan that was found, and how far it is from the best.

options   the decisions open to each unit, and what each one costs
fluid     a linear model whose optimum no schedule beats
rounding  from the model's fractions to decisions
schedule  from decisions to leads and drains that respect a memory limit
judging   decisions -> the best schedule's seconds, by the simulator
search    local search over decisions
planner   the pipeline
"""
