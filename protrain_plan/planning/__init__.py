"""From a profile and budgets to the fastest plan found, and its gap to the best.

model      one problem as mathematics: options, linear and integer programs, bounds search
feasible decisions, each with its best schedule, judged by the simulator explain    reasons for a
plan, and remedies if there is none questions  users' questions: the fastest step, the least memory,
the largest batch, a front outcome    their answers
"""
