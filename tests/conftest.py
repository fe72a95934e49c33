"""Settings that must hold before torch is imported, the same as on the command line."""

import os

# A lane's waiting threads must not spin on the processors that compute; the profiler's allocator
# warnings are about blocks that we know of.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
