"""Plans in training frameworks: one module per framework.

Each takes the framework's model, optimizer and loop, makes the model follow a plan, and refuses
settings that would break the plan. Only its module needs the framework's package.
"""
