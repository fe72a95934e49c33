"""What the machine offers. In: a device, a folder, a limit. Out: lanes, stores, buffers, meters."""
