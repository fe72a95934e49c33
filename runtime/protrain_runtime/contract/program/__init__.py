"""The meaning of a plan. In: a plan and its profile. Out: `Program`s, and recordings of them."""
