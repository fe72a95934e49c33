"""From a profile and budgets to the fastest plan that was found, and how far it is from the best.

objectives  what users ask: the fastest step, least memory, the largest batch, a front
pins      decisions that the user fixes
options   the decisions open to each unit, and what each one costs
fluid     a linear model whose optimum no schedule beats
leanest   the least memory that a model can be trained in
rounding  from the model's fractions to decisions
schedule  from decisions to leads and drains that respect a memory limit
judging   decisions -> the best schedule's seconds, by the simulator
search    local search over decisions
baselines, four_parameter   what users would pick instead
growth, largest   profiles of other sizes, and the largest that fits
explaining, limiting, wording   why a plan is as it is
lanes     a bound that takes a moment
planner   the pipeline
replicas  the pipeline for each number of replicas that may be best
"""
