"""An activation option of one's own: copies in 16 bits of what a block saves in 32.

What a new option takes: this file, with its executor, and the entry at its end.
"""

from torch import Tensor, bfloat16, float32, is_grad_enabled, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from protrain_runtime.activations.forms import Code, outer_hooks
from protrain_runtime.contract.records import ActivationForm


def keep_half(forward: Code, module: nn.Module) -> Code:
    """The executor: around the forward, saved float32 activations are kept as bfloat16."""

    def run(*args: object, **kwargs: object) -> object:
        if not is_grad_enabled():
            return forward(*args, **kwargs)
        keep, bring_back = outer_hooks()
        parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        # A tensor that several operators save is copied once. Nothing is held here: a storage's
        # address is another's when it has died.
        made: dict[tuple[object, ...], tuple[StorageWeakRef, tuple[object, bool]]] = {}

        def pack(tensor: Tensor) -> tuple[object, bool]:
            storage = tensor.untyped_storage()
            if tensor.dtype != float32 or storage._cdata in parameters:
                return keep(tensor), False  # a view of a chunk's buffer, which fetches bring back
            place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
            if place not in made or made[place][0].expired():
                copy = keep(tensor.detach().to(bfloat16)), True
                made[place] = StorageWeakRef(storage), copy
            return made[place][1]

        def unpack(kept: tuple[object, bool]) -> Tensor:
            tensor, halved = bring_back(kept[0]), kept[1]
            return tensor.to(float32) if halved else tensor

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return run


HALF = ActivationForm(
    name="half",
    keeps="bfloat16 copies of what autograd saves in float32",
    executor="tests.support.half_activations:keep_half",
    recomputes=False,
    exactness="approximate",
)
