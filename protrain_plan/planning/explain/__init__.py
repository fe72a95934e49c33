"""Why a plan is what it is. In: a solved problem. Out: reasons, limits and advice, as numbers."""
