"""The server that forks processes imports this first: it ends with its parent."""

from protrain_plan.isolated.ending import end_with_parent

end_with_parent()
