"""A plan's simulated step for people. In: a plan and its profile. Out: a page, a trace."""
