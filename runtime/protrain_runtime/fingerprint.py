"""A model's fingerprint: whether a plan was made for it."""

import hashlib

from torch import nn


def model_fingerprint(model: nn.Module) -> str:
    """A digest of the module tree, and of all parameters and buffers by name, shape and dtype.

    Values do not count, nor does the device; what is trainable and what is tied does.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"module {name} {type(module).__qualname__}\n".encode())
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = "x".join(map(str, parameter.shape))
        trainable = "trainable" if parameter.requires_grad else "frozen"
        first = first_names[parameter]
        tied = "" if first == name else f" tied to {first}"
        line = f"parameter {name} {shape} {parameter.dtype} {trainable}{tied}\n"
        digest.update(line.encode())
    for name, buffer in model.named_buffers():
        shape = "x".join(map(str, buffer.shape))
        digest.update(f"buffer {name} {shape} {buffer.dtype}\n".encode())
    return f"sha256:{digest.hexdigest()[:24]}"
