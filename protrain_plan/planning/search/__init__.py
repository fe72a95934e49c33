"""Plans that meet a problem. In: the problem and its LP. Out: decisions, schedules, seconds."""
