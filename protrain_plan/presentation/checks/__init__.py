"""A check's report and a difference of plans in every format. In: verdicts. Out: text, JSON."""
