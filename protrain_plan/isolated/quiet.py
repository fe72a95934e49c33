"""Libraries that do not say what is of no use to the reader."""

import logging


def quiet_libraries() -> None:
    """Silence them, in this process."""
    # torchao, which peft imports where it is installed, says what of its kernels a machine lacks.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    # bitsandbytes that it has a kernel for this processor in a package that is not there.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
