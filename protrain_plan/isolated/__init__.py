"""Work in processes of their own, and one error for whatever ends them.

process     `run(work)`: a fresh process, or one with limits, forked from a server with PyTorch
server      what that server imports first
ending      a process ends with its parent; libraries are quiet in it
user_frame  errors of a model's code with the line of the user's that raised them
pool        our own work, from several processes at once
"""
