"""The machine's devices. In: a device, a folder, a limit. Out: lanes, stores, buffers, meters."""
