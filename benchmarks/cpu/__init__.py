"""Evidence from a CPU machine, under a limit of the operating system."""
