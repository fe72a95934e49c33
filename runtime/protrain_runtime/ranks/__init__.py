"""This rank among the others. In: a process group. Out: groups, and facts of other ranks."""
