"""A plan's simulated step for people: on a terminal, as a page, as a trace.

All three are drawn from a `Step` (step.py): a plan with the profile that it was made from. Bytes
over time are in memory.py, what runs on the lanes in lanes.py.
"""
