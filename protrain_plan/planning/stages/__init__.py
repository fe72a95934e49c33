"""Pipeline stages: how many, where to cut, and what every stage decides. In: profiles; out: a plan.

cuts      where a model may be cut, and the best cuts for given bounds of stages
shapes    arrangements of devices: stages, shard groups, replicas, micro-batches, chunks
cycles    the planning problem of one stage, and what it takes at least
schedule  the order of forwards and backwards, and a simulation of all stages
pipelines planned stages, simulated together, and their plan file
answer    the search over all of that, with a proof
assumed   the same with one assumption about the machine changed
"""
