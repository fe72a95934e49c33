"""What tells a user what is wrong. In: a model, a plan, a step. Out: refusals and recordings."""
