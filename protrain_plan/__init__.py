"""protrain-plan: an offline planner for training under a memory limit.

Nouns are records that travel as YAML (`Hardware`, `Profile`, `Plan`); verbs turn one into the
next: profile, plan, simulate, run.
"""

from protrain_runtime.contract import __version__

__all__ = ["__version__"]
