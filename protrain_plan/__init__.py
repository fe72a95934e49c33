"""protrain-plan: an offline planner for training under a memory limit.

Nouns are records that travel as YAML (`Hardware`, `Profile`, `Plan`); verbs turn one into the
next: profile, plan, simulate, run.
"""

__version__ = "0.1.0"
