"""Plans in the frameworks that people train with: one module per framework.

Each takes the model, optimizer and loop that the framework has, makes the model follow a plan, and
refuses settings that would break the plan's promises. The framework's own package is needed by its
module alone.
"""
