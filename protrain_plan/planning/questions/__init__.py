"""Users' questions. In: a profile and budgets. Out: the fastest plan, least memory, a front."""
