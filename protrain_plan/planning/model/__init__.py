"""One planning problem as mathematics. In: a profile, budgets, pins. Out: LPs, MILPs and bounds."""
