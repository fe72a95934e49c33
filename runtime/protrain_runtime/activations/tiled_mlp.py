"""The form `tiled` of a block: recomputed as in `full`, its MLP over a few tokens at a time.

In backward a recomputed block holds all that its MLP saves, of all tokens: most of a block's saved
bytes. Here only the MLP's input is saved, and backward runs the MLP's forward and backward of one
tile of tokens after another, `TILES` in all. The MLP's forward runs twice, as in `full`: not when
the block's forward runs again, since nothing else needs its output, but tile by tile. Gradients of
weights are sums over tiles in float32: equal to plain PyTorch's up to the order and rounding of
sums. (Mini-sequence transformer, arXiv 2407.15892.)

An MLP is a module inside the block whose operators treat every token separately, as observed in its
first call (`_Watching`): products with weights, and operators that are element-wise, along the
features or on weights alone. Modules that mix tokens, draw random numbers or write in place are not
MLPs. Blocks without an MLP are recomputed as in `full`, and so is compiled code, which shows no
modules.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from protrain_runtime.activations.compiled import is_compiled, replace_code
from protrain_runtime.activations.forms import Code
from protrain_runtime.activations.recompute import full, recomputed
from protrain_runtime.activations.tiled_loss import tiles
from protrain_runtime.activations.trees import PLAIN, named, tensors_in
from protrain_runtime.activations.twice import Saved, run_twice
from protrain_runtime.devices.device import autocast_as_now

TILES = 8


def tiled(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `tiled`; for compiled code, of `full`."""
    if any(map(is_compiled, module.modules())):
        return full(forward, module)
    mlps = _Mlps(module)

    def run(*args: object, **kwargs: object) -> object:
        with mlps.tiled():
            return forward(*args, **kwargs)

    return recomputed(run, module, run_twice)


@dataclass(eq=False)
class _Mlps:
    """A block's MLPs, found at the first call of each candidate."""

    block: nn.Module
    _found: dict[nn.Module, bool] = field(default_factory=dict[nn.Module, bool], init=False)

    @cached_property
    def _candidates(self) -> list[nn.Module]:
        """Modules of several, with weights of products; only valid in the block's slot.

        Offloaded parameters have no shape elsewhere.
        """
        return [
            module
            for module in self.block.modules()
            if module is not self.block
            and len(list(module.modules())) > 2
            and sum(parameter.dim() == 2 for parameter in module.parameters()) > 1
        ]

    @contextmanager
    def tiled(self) -> Iterator[None]:
        """Run MLPs in tiles inside."""
        with ExitStack() as stack:
            for module in self._candidates:
                watched = any(  # by hooks, which would see tiles
                    one._forward_hooks or one._forward_pre_hooks or one._backward_hooks
                    for one in module.modules()
                )
                if not watched:
                    code = partial(self._run, module, module.forward)
                    stack.callback(replace_code(module, code))
            yield

    def _run(self, module: nn.Module, forward: Code, *args: Any, **kwargs: Any) -> object:
        if kwargs or len(args) != 1 or not _is_input(args[0]):
            return forward(*args, **kwargs)
        [given] = args
        if module not in self._found:
            self._found[module] = takes_tokens_apart(forward, given)
        if not self._found[module] or not torch.is_grad_enabled():
            return forward(given)
        parameters = [one for one in module.parameters() if one.requires_grad]
        if not given.requires_grad and not parameters:
            return forward(given)
        # Saved first: the recomputation ends here if the block needs nothing after it.
        anchor = torch.empty(0, requires_grad=True)
        saved = Saved.apply(anchor, given)  # type: ignore[no-untyped-call]
        return _Tiles.apply(given, (saved,), forward, *parameters)  # type: ignore[no-untyped-call]


def _is_input(given: object) -> bool:
    """Whether the input is several tokens [batch, length, features]."""
    return (
        isinstance(given, Tensor)
        and type(given) in PLAIN
        and given.dim() == 3
        and given.is_floating_point()
        and given.layout == torch.strided
        and given.shape[0] > 0
        and given.shape[1] > 1
    )


def takes_tokens_apart(forward: Code, given: Tensor) -> bool:
    """Whether a forward treats every token separately, by a trial on a few."""
    few = given.detach()[:, :_TRIED].contiguous()
    watching = _Watching(few)
    try:
        with torch.no_grad(), watching:
            found = forward(few)
    except Exception:  # noqa: BLE001 (it mixes tokens, or wants more, as windows of attention do)
        return False
    return isinstance(found, Tensor) and id(found) in watching.made and found.dim() == 3


_TRIED = 2


class _Tiles(torch.autograd.Function):
    """An MLP [batch, length, features] -> [batch, length, features], tile by tile of tokens."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, saved: tuple[Tensor], forward: Code, *parameters: Tensor
    ) -> Any:
        # In a tuple: the graph does not lead through it.
        [ctx.saved], ctx.code, ctx.parameters = saved, forward, parameters
        ctx.autocast = autocast_as_now(given.device.type, caches=False)
        found: Tensor | None = None
        for tokens in tiles(given.shape[1], -(-given.shape[1] // TILES)):
            part: Any = forward(given[:, tokens].contiguous())
            if found is None:
                found = part.new_empty((*given.shape[:2], part.shape[-1]))
            found[:, tokens] = part
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Read through the hooks of the forward, which may recompute it. The graph's node outlives
        # its backward, and would hold it.
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise RuntimeError(
                "backward ran once more through an MLP that the plan computes in tiles: what it"
                " saves is there for one backward"
            )
        [given] = saved.grad_fn.saved_tensors
        del saved
        parameters: tuple[Tensor, ...] = ctx.parameters
        of_given = ctx.needs_input_grad[0]
        found = torch.empty_like(given) if of_given else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for tokens in tiles(given.shape[1], -(-given.shape[1] // TILES)):
            own = given[:, tokens].detach().contiguous().requires_grad_(of_given)
            with torch.enable_grad(), ctx.autocast():
                part: Any = ctx.code(own)
            wanted = [own, *parameters] if of_given else list(parameters)
            parts: list[Tensor | None] = list(
                torch.autograd.grad(part, wanted, upstream[:, tokens], allow_unused=True)
            )
            del part
            if found is not None:
                own_gradient = parts.pop(0)
                found[:, tokens] = 0 if own_gradient is None else own_gradient
            for number, one in enumerate(parts):
                if one is not None:
                    total = sums[number]
                    sums[number] = one.float() if total is None else total.add_(one)
            del parts, own
        cast = [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, parameters, strict=True)
        ]
        return found, None, None, *cast


class _MixesError(Exception):
    """An operator that mixes tokens, or is unknown."""


_SAME_ORDER = frozenset(("view", "_unsafe_view", "alias", "detach", "clone", "_to_copy"))
_SUMS = frozenset(("mean", "sum", "amax", "_softmax"))


class _Watching(TorchDispatchMode):
    """Follows tokens [batch, length, features] through operators; raises if they could mix."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        batch, length, _ = tokens.shape
        self._leading = ((batch, length), (batch * length,))
        self.made: dict[int, Tensor] = {id(tokens): tokens}  # from the tokens

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a tensor's device
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _MixesError
        given = tensors_in((args, kwargs))
        own = [tensor for tensor in given if id(tensor) in self.made]
        if own and not self._is_known(func, named(func, args, kwargs), given, own):
            raise _MixesError
        result = func(*args, **kwargs)
        if own:
            for made in tensors_in(result):
                if tuple(made.shape[:-1]) not in self._leading:
                    raise _MixesError
                self.made[id(made)] = made
        return result

    def _is_known(
        self, func: Any, arguments: Mapping[str, Any], given: list[Tensor], own: list[Tensor]
    ) -> bool:
        name = func._schema.name.partition("::")[2]
        others = [tensor for tensor in given if id(tensor) not in self.made]
        if torch.Tag.pointwise in func.tags:
            alike = len({tensor.shape[:-1] for tensor in own}) == 1
            return alike and all(
                tensor.numel() == max(tensor.shape[-1:], default=1) for tensor in others
            )
        if name == "mm":
            return arguments["self"] is own[0] and len(own) == 1
        if name == "addmm":
            return arguments["mat1"] is own[0] and len(own) == 1
        last = (-1, own[0].dim() - 1)
        if name in _SUMS:
            dims = arguments.get("dim")
            dims = [dims] if isinstance(dims, int) else dims or []
            return len(dims) == 1 and dims[0] in last
        if name in ("split", "split_with_sizes", "slice"):
            return arguments["dim"] in last
        if name == "native_layer_norm":
            return len(arguments["normalized_shape"]) == 1
        return name in _SAME_ORDER
