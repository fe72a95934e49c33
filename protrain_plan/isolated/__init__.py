"""Work in processes of their own, with limits, and with one error for whatever ends them.

process      `run(work, limits)`: a fresh process, or one forked from a server with PyTorch
containment  a process ends with its parent, and a model's code leaves none behind
culprit      errors of a model's code with the line of the user's that raised them
pool         our own work, from several processes at once
quiet        libraries that do not say what is of no use
"""
