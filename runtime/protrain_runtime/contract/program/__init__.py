"""The meaning of a plan. Plan -> `Program`: moves in order, the bytes of each, what one rank has.

In: a plan and its profile. Out: what simulator and runtime read, and recordings of it.
"""
