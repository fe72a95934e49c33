"""Partial recomputation: outputs of a block's expensive operators are kept, the rest runs again.

*Expensive* are matrix products (`mm`, `addmm`, `bmm`, grouped and scaled ones), convolutions and
attention kernels, recognized by name. Norms, activation functions, element-wise operators, look-ups
and views are cheap. A form keeps the outputs of a block's first expensive operators, except
low-rank products (`is_low_rank`):

    lite   all of them
    mlp    up to the one after the last attention, which is its output projection
    attn   up to the last attention

Attention is a kernel of that name, or two batched products with a softmax in between, whose outputs
are kept for any shape. A block without attention keeps nothing in the forms mlp and attn. In a
compiled block, only operators called by its compiled code are seen.

In backward the block's forward runs again; in place of these operators their outputs are returned
in order, and dropped. Low-rank products keep their places in that order, and run again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Self, assert_never

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from protrain_runtime.activations.forms import Code, outer_hooks
from protrain_runtime.activations.recompute import recomputed
from protrain_runtime.activations.trees import named, tensors_in, written_arguments
from protrain_runtime.activations.twice import Saved, run_twice
from protrain_runtime.devices import device as devices


def _keeping_first(count: "Callable[[_Keeping], int]", forward: Code, module: nn.Module) -> Code:
    """The executor of a form that keeps a block's inputs and first `count` expensive outputs."""

    def twice(forward: Code, *inputs: torch.Tensor) -> object:
        keeping, replaying = _Keeping(), _Replaying()
        outputs = run_twice(forward, *inputs, contexts=(keeping, replaying))
        replaying.take(keeping.kept(count(keeping), handed_on=tensors_in(outputs)))
        return outputs

    return recomputed(forward, module, twice)


lite = partial(_keeping_first, lambda found: len(found.outputs))
mlp = partial(
    _keeping_first, lambda found: found.num_to_attention + 1 if found.num_to_attention else 0
)
attn = partial(_keeping_first, lambda found: found.num_to_attention)


def _name(operator: Any) -> str:
    """The name without namespace and overload."""
    name: str = operator.name().rpartition("::")[2].partition(".")[0]
    return name


Kind = Literal["cheap", "in place", "softmax", "product", "batched product", "attention"]


@cache
def kind_of(operator: Any) -> Kind:
    """The kind of an operator, by its name without overload."""
    name = _name(operator)
    schema = getattr(operator, "_schema", None)  # higher-order operators have none
    if schema is not None and schema.is_mutable:
        return "in place"
    if "attention" in name or "attn" in name:
        return "attention"
    if name in ("bmm", "baddbmm"):
        return "batched product"
    if name.endswith(("mm", "mv")) or any(word in name for word in _PRODUCTS):
        return "product"
    return "softmax" if "softmax" in name else "cheap"


_PRODUCTS = ("convolution", "matmul", "gemm", "gemv")

LARGEST_RANK = 64
"""[Note: what a low-rank product costs] By the roofline model (Williams, Waterman and Patterson,
2009), an operator takes as long as its arithmetic or its traffic does, whichever is longer. Let the
result have m rows and n columns. With an inner dimension k <= m and k <= n the product moves
mk + kn + mn elements, no more than the 3 mn of an addition of such results. Its arithmetic, 2 mnk,
takes no longer than that addition up to k = 1.5 e F / B, with e bytes per element, and F FLOP/s and
B bytes/s that operators reach. The least such k among the machines of the catalogue is 214 in 16
bits (RTX 3090). In float32 it is 48 (B200), where a product of 64 takes a third longer than the
addition. A bound that depended on the machine would make a plan's bytes depend on it, too."""

_OPERANDS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def is_low_rank(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call is a product about as cheap as an element-wise operator.

    Its inner dimension is at most `LARGEST_RANK`, and no larger than either side of the result, as
    in LoRA's second product: [tokens, r] times [r, features]. The first one, [tokens, features]
    times [features, r], has a small result and a large operand: not cheap.
    """
    operands = _OPERANDS.get(_name(operator))
    if operands is None:
        return False
    left, right = map(named(operator, args, kwargs).__getitem__, operands)
    if left.layout != torch.strided or right.layout != torch.strided:
        return False  # other layouts have other costs
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return bool(inner <= min(LARGEST_RANK, rows, columns))


@dataclass(slots=True)
class _Output:
    """The output of an expensive operator.

    result        a tree with tensors in it; None of an operator that runs again
    num_saved     tensors that autograd had saved in the block when the operator ran
    random_state  after the operator, where it may have drawn random numbers
    """

    operator: Any
    result: Any
    num_saved: int
    random_state: torch.Tensor | None


@dataclass(slots=True)
class _Count:
    value: int = 0


class _Mode(TorchDispatchMode):
    """A mode that leaves compiled code compiled, and does not look into it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside: Any = None  # excluded by dispatch at the block's call
        self._nested = 0

    def __enter__(self) -> Self:
        self._outside, self._nested = torch._C._dispatch_tls_local_exclude_set(), _nesting()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def ran(self, func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run the operator as without a mode.

        Within one PyTorch has autocast off, and a Python kernel of a package, such as bitsandbytes'
        product with packed weights, may call operators that autocast casts. If the block has its
        own autocast around that, its state is invisible, and it is off.
        """
        if func.namespace == "aten" or self._outside is None or _nesting() != self._nested:
            return func(*args, **kwargs)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in _AUTOCAST:
            if not self._outside.has(key):
                excluded = excluded.remove(key)
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return func(*args, **kwargs)


_AUTOCAST = [
    key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")
]


def _nesting() -> int:
    """The number of autocasts around."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class _Keeping(_Mode):
    """The forward: collects the outputs of all expensive operators.

    The form's choice is known when the block has ended. Until then all are held, in a slot that
    holds no more than the block's backward slot, where everything is back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[_Output] = []
        self.num_to_attention: int = 0  # outputs up to the last attention
        self._last: Kind = "cheap"
        self._undecided: _Output | None = None  # low-rank: runs again, unless it is attention's
        self._num_saved = _Count()

    def __enter__(self) -> Self:
        # See [Note: what early stopping makes superfluous]. The hooks hold the count, not this
        # object: saved tensors hold hooks, and would hold the collected outputs.
        pack, unpack = outer_hooks()
        count = self._num_saved

        def counted(tensor: torch.Tensor) -> object:
            count.value += 1
            return pack(tensor)

        self._hooks = saved_tensors_hooks(counted, unpack)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        kind = kind_of(func)
        match kind:
            case "cheap":
                pass
            case "softmax":
                if self._last == "batched product":
                    self._last = kind
            case "in place":
                self._copy_before_writes(written_arguments(func, args, kwargs))
            case "product" | "batched product" | "attention":
                num_saved = self._num_saved.value
                result = self.ran(func, args, kwargs)
                state = None
                if kind == "attention" and named(func, args, kwargs).get("dropout_p") != 0:
                    # It may have drawn random numbers, from the generator of its device.
                    state = devices.random_state(tensors_in(result)[0].device)
                held = tree_map_only(torch.Tensor, _alias, result)
                self.outputs.append(_Output(func, held, num_saved, state))
                self._decide(kind, low_rank=is_low_rank(func, args, kwargs))
                return result
            case _:
                assert_never(kind)
        return self.ran(func, args, kwargs)

    def _decide(self, kind: Kind, *, low_rank: bool) -> None:
        """Mark outputs as attention's, or as dropped, on the next operator."""
        output = self.outputs[-1]
        second = kind == "batched product" and self._last == "softmax"
        if self._undecided is not None and not second:
            self._undecided.result = None
        self._undecided = None
        if second or kind == "attention":
            self.num_to_attention = len(self.outputs)
        elif low_rank and kind == "batched product":
            self._undecided = output
        elif low_rank:
            output.result = None
        self._last = kind

    def _copy_before_writes(self, written: list[torch.Tensor]) -> None:
        """Protect kept tensors from in-place writes: recomputation writes to the copy."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for output in self.outputs:
            output.result = tree_map_only(
                torch.Tensor,
                lambda kept: kept.clone() if kept.untyped_storage()._cdata in storages else kept,
                output.result,
            )

    def kept(self, count: int, *, handed_on: list[torch.Tensor]) -> list[_Output]:
        """The first `count` outputs, released here; outputs of the block itself are copied."""
        # [Note: what early stopping makes superfluous] Recomputation ends at the last tensor that
        # autograd saved. Operators after it, such as a block's last product, are not reached.
        total = self._num_saved.value
        if self._undecided is not None:
            self._undecided.result = None
        self.outputs = [one for one in self.outputs[:count] if one.num_saved < total]
        self._copy_before_writes(handed_on)
        kept, self.outputs = self.outputs, []
        return kept


class _Replaying(_Mode):
    """The recomputation: returns kept outputs in place of running the operators."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[_Output] | None = None
        self._saved: Any = None
        self._left: deque[_Output] = deque()

    def take(self, outputs: list[_Output]) -> None:
        """Hold the outputs until backward; the hooks around the block hold their tensors."""
        tensors = tensors_in([output.result for output in outputs])
        anchor = torch.empty(0, requires_grad=True)
        self._saved = Saved.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
        for output in outputs:
            output.result = tree_map_only(torch.Tensor, lambda _: _Hole(), output.result)
        self._outputs = outputs

    def __enter__(self) -> Self:
        if self._outputs is None:
            raise RuntimeError(
                "a block that is recomputed in part was recomputed before its forward had ended, or"
                " a second time: what it keeps is there for one backward. Call backward() once"
                " after the forward, and read ctx.saved_tensors once in functions of your own; or"
                ' plan with --pin "BLOCK: recompute"'
            )
        outputs, self._outputs = self._outputs, None
        saved, self._saved = self._saved, None
        tensors: Iterator[torch.Tensor] = iter(saved.grad_fn.saved_tensors)
        for output in outputs:
            # A tensor from a tier is a view of its bytes, which the block may not write to.
            output.result = tree_map_only(_Hole, lambda _: _alias(next(tensors)), output.result)
        self._left.extend(outputs)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._left.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not self._left or kind_of(func) not in ("product", "batched product", "attention"):
            return self.ran(func, args, kwargs or {})
        output = self._left.popleft()
        if func is not output.operator:
            raise RuntimeError(
                f"a block that is recomputed in part ran {func} in backward where it had run"
                f" {output.operator} in forward: it has to compute the same every time"
            )
        if output.random_state is not None:
            where = tensors_in(output.result)[0].device
            devices.set_random_state(where, output.random_state)
        if output.result is None:
            return self.ran(func, args, kwargs or {})
        return output.result


class _Hole:
    """Stands for a tensor in a tree."""


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside the graph, which would keep alive what holds it.

    PyTorch counts a write to either for both: writes from outside the block before backward are
    detected, unless the block had reshaped the tensor first.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
