"""An accelerator that a CPU emulates: streams are threads, memory is out of the host's reach.

It is a real device to PyTorch (a PrivateUse1 backend, type "emulated", two of them), so that what
the runtime does on an accelerator runs on any machine with a C++ compiler: a missing wait is a
wrong number or a crash, and seeded delays make sure that it is. `src` is the extension, `building`
compiles it, `device` makes PyTorch know it. Of speed it tells nothing.
"""
