"""This rank among the others. In: a launcher's environment. Out: groups, and what others tell."""
