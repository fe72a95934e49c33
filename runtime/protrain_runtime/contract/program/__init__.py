"""The meaning of a plan. Plan -> `Program`: ordered moves, their bytes, one rank's part.

In: a plan and its profile. Out: programs for simulator and runtime, and recordings of them.
"""
