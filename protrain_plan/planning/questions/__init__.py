"""What users ask. In: a profile and budgets. Out: the fastest plan, the least memory, a front."""
