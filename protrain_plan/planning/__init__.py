"""From a profile and budgets to the fastest plan that was found, and how far it is from the best.

model      one problem as mathematics: options, linear and integer programs, bounds
search     decisions that meet it, each with its best schedule, judged by the simulator
explain    why a plan is as it is, and what would help where there is none
questions  what users ask: the fastest step, the least memory, the largest batch, a front
outcome    what any of them answers
"""
