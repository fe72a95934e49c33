"""Compressed copies: a block's saved tensors in fewer bytes, inexactly.

Hooks around a block's forward pack what autograd saves, and unpack it in backward:

    int8       floating-point tensors become int8 with a scale for every 256 elements, as in Mesa
               (Pan et al., arXiv 2111.11124), rounded stochastically
    low-rank   the inputs x of linear layers become x P, P [features, rank] random, as in CompAct
               (Shamshoum et al., arXiv 2410.15352); other tensors stay

The forward's results do not change. In backward, the expectation of an unpacked tensor is the saved
one, so gradients that are linear in it, such as a linear layer's, are unbiased. The packed bytes go
to the hooks around the block: a swap moves them in place of the tensors.

[Note: random numbers without a generator] Random numbers are a hash of the saved values: SplitMix64
(Steele, Lea and Flood, OOPSLA 2014), seeded with sums over them. No random state of the training is
touched or added to checkpoints, and no device waits for its host: equal values round equally in
every run, in resumed runs, and in any tier. Other values, such as the next step's, are rounded
independently. Expectations below are over `SEED`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from protrain_runtime.activations.compiled import is_compiled_in_place
from protrain_runtime.activations.forms import Code, outer_hooks
from protrain_runtime.activations.trees import named, tensors_in

GROUP = 256
"""Elements that share a scale: Mesa's and ActNN's number (Chen et al., arXiv 2104.14129). A float32
scale is 1.6 % of a group's bytes."""

MIN_ELEMENTS = 16 * GROUP
"""Smaller tensors stay: they add up to nothing, and packing has a fixed cost."""

TILE = 1 << 22
"""Elements packed or unpacked at a time: at most 8 bytes of workspace each, 32 MiB."""

SEED = 0

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def int8(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `int8`."""

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        copies = _Copies(module, (args, kwargs))
        with saved_tensors_hooks(
            lambda tensor: (
                copies.packed(tensor, _as_int8) if copies.flows(tensor) else copies.keep(tensor)
            ),
            copies.unpack,
        ):
            return forward(*args, **kwargs)

    return run


def low_rank(forward: Code, module: nn.Module) -> Code:
    """The executor of the form `low-rank`. A no-op for compiled code, which shows no linear layers.

    A linear layer with a frozen weight saves no input. An input that another operator has saved,
    such as attention's output, stays: a projection would add to it.
    """
    if is_compiled_in_place(module):
        return forward

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        copies, products = _Copies(module, (args, kwargs)), _Products()
        whole: dict[int, StorageWeakRef] = {}  # storages that stay

        def pack(tensor: Tensor) -> object:
            storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
            if products.inside and copies.flows(tensor) and rank_of(tensor.shape[-1]) is not None:
                assert storage is not None
                known = whole.get(storage._cdata)
                if known is None or known.expired():
                    return copies.packed(tensor, _as_projection)
            if storage is not None:
                whole[storage._cdata] = StorageWeakRef(storage)
            return copies.keep(tensor)

        with saved_tensors_hooks(pack, copies.unpack), products:
            return forward(*args, **kwargs)

    return run


def rank_of(features: int) -> int | None:
    """Columns of the projection: a quarter of `features`, in eights; None for less than 32.

    [Note: the variance of a projected gradient] Let G = g^T x be a weight's gradient. Computed is
    G' = g^T x P P^T. The elements of P are +-1 / sqrt(rank), independent between rows and pairwise
    independent within one. So E[P P^T] = I, and E[G'] = G. An element off the diagonal of P P^T has
    the variance 1 / rank, and one on it is 1: E|G' - G|^2 = |G|^2 (features - 1) / rank, which is 4
    |G|^2 here. The learning rate has to bear it, like the noise of small batches. CompAct projects
    on an eighth to a half.
    """
    return None if features < 32 else -(-features // 32) * 8


@dataclass(slots=True, weakref_slot=True)
class _Packed:
    """A tensor's elements in fewer bytes; `counter` counts the writes to the tensor."""

    restored: Callable[[Callable[[object], Tensor]], Tensor]  # given the outer unpack; [elements]
    counter: Tensor
    version: int
    source: StorageWeakRef


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor's layout in the elements of a copy, which several may share."""

    copy: _Packed
    shape: torch.Size
    stride: tuple[int, ...]


Compressor = Callable[[Tensor, int, Callable[[Tensor], object]], Callable[..., Tensor]]
"""Takes ordered elements, the last dimension's size, and the outer pack; returns `restored`."""


class _Copies:
    """The copies that one forward of a block packs.

    Weights stay: parameters, buffers, and what autocast and adapters make of parameters, recognized
    by its graph, or by its shape if it has no gradient. So do inputs without gradients, such as
    masks, which other blocks hold as well. A tensor that several operators save is packed once.
    """

    def __init__(self, module: nn.Module, inputs: object) -> None:
        self.keep, bring_back = outer_hooks()
        stay = [*module.parameters(), *module.buffers()]
        self._shapes = {tuple(sorted(tensor.shape)) for tensor in stay}
        stay += [tensor for tensor in tensors_in(inputs) if not tensor.requires_grad]
        self._stay = {
            tensor.untyped_storage()._cdata for tensor in stay if tensor.layout == torch.strided
        }
        # A dead storage's identity is reused: a live copy shows that its storage lives.
        self._made: WeakValueDictionary[tuple[object, ...], _Packed] = WeakValueDictionary()

        # Not a method: saved tensors hold it, and would hold this object.
        def unpack(saved: object) -> Tensor:
            if not isinstance(saved, _View):
                return bring_back(saved)
            if saved.copy.counter._version != saved.copy.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    " inplace operation: an activation was written after it was saved for backward"
                )
            with torch.no_grad():
                return saved.copy.restored(bring_back).as_strided(saved.shape, saved.stride)

        self.unpack = unpack

    def flows(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is an activation worth a copy."""
        if (
            tensor.layout != torch.strided
            or tensor.dtype not in _FLOATS
            or tensor.numel() < MIN_ELEMENTS
            or tensor.untyped_storage()._cdata in self._stay
            or tensor.is_neg()
            or tensor.is_inference()
        ):
            return False
        if tensor.requires_grad:  # not a leaf, such as a parameter, nor a view or a cast of one
            node: Any = tensor.grad_fn
            while node is not None and node.name() in _VIEWS:
                node = node.next_functions[0][0]
            return node is not None and not hasattr(node, "variable")
        return tuple(sorted(tensor.shape)) not in self._shapes

    def packed(self, tensor: Tensor, compressor: Compressor) -> object:
        """The tensor as a view of a copy."""
        # Dimensions of stride 0 are expanded: their elements are packed once.
        lies = zip(tensor.shape, tensor.stride(), strict=True)
        expanded = [size > 1 and step == 0 for size, step in lies]
        once = tensor.detach()
        for dimension, was in enumerate(expanded):
            once = once.narrow(dimension, 0, 1) if was else once
        dense = _is_dense(once)
        storage = tensor.untyped_storage()
        place = (
            storage._cdata,
            once.storage_offset(),
            once.numel() if dense else (once.shape, once.stride()),
            tensor.dtype,
            tensor._version,
        )
        once = once if dense else once.contiguous()
        copy = self._made.get(place)
        if copy is None or copy.source.expired():
            counter = tensor.detach()
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            elements = once.as_strided((once.numel(),), (1,))
            restored = compressor(elements, tensor.shape[-1], self.keep)
            copy = _Packed(restored, counter, tensor._version, StorageWeakRef(storage))
            self._made[place] = copy
        steps = zip(expanded, once.stride(), strict=True)
        return _View(copy, tensor.shape, tuple(0 if was else step for was, step in steps))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the storage without gaps, each once, in any order."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for step, size in sorted((step, size) for step, size in dimensions if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("T", "ToCopy", "View", "UnsafeView", "Transpose", "Permute", "Unsqueeze", "Alias")
)


def _as_int8(
    elements: Tensor, _: int, keep: Callable[[Tensor], object]
) -> Callable[[Callable[[object], Tensor]], Tensor]:
    packed, dtype = quantized(elements), elements.dtype
    kept = keep(packed)
    return lambda bring_back: dequantized(bring_back(kept), dtype)


def quantized(elements: Tensor) -> Tensor:
    """Elements as int8 with a scale for every `GROUP`, rounded stochastically.

    A scale is a group's largest magnitude / 127. An element y of scales becomes floor(y + u), u
    uniform on [0, 1): its expectation is y, the error is below one scale, and the variance is
    f (1 - f) scale^2 <= scale^2 / 4, f being the fraction of y. Zero stays zero, and no sign
    changes. u is the fraction of r + s, with r of the group and s of the place in it, independent
    and uniform, so that any two elements' errors are independent: sum of w_i x_i has the variance
    sum of w_i^2 Var[x_i]. u has 16 bits, so that |E[error]| is below 2^-14 scales, float32's
    rounding included. A group with NaN or infinity in it comes back as NaN: gradients are not
    finite then, as without a copy.

    elements: [elements] in 16 or 32 bits. Returns uint8 [4 * groups + elements]: the scales as
    float32, then the integers.
    """
    count = elements.numel()
    groups = -(-count // GROUP)
    packed = torch.empty(4 * groups + count, dtype=torch.uint8, device=elements.device)
    for rows, scales, integers in _tiles(packed, count):
        values = elements[rows].view(integers.shape)
        # Twice as many passes as `aminmax` along a dimension, each thirty times as fast on a CPU:
        # 0.07 against 2.1 ns per element (AVX-512, one thread, PyTorch 2.13).
        most = torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())
        most = most.float()
        # The smallest normal number: a group of zeros has no scale.
        torch.mul(most, _STEP, out=scales).clamp_(min=torch.finfo(torch.float32).tiny)
        num_rows, num_columns = integers.shape
        words = _words(_seed(values.sum(1, dtype=torch.float32)), num_rows + num_columns)
        noise = (words & 0xFFFF).float().mul_(2.0**-16)  # multiples of 2^-16 in [0, 1)
        scaled = (noise[:num_rows, None] + noise[num_rows:]).frac_()
        scaled.addcdiv_(values, scales)
        integers.copy_(scaled.floor_().clamp_(-127, 127))
    return packed


_STEP = (1 - 2.0**-22) / 127
"""So that 127 scales are no more than the largest magnitude, float32's rounding included: of the
largest finite number, no infinity."""


def dequantized(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantized elements: integer * scale."""
    count = packed.numel() - 4 * -(-packed.numel() // (GROUP + 4))  # without the scales
    elements = torch.empty(count, dtype=dtype, device=packed.device)
    for rows, scales, integers in _tiles(packed, count):
        found = elements[rows].view(integers.shape)
        wide = (
            found if dtype == torch.float32 else found.new_empty(found.shape, dtype=torch.float32)
        )
        wide.copy_(integers).mul_(scales)  # a mixed-dtype product is slower than the two
        if wide is not found:
            found.copy_(wide)
    return elements


def _tiles(packed: Tensor, count: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Tiles of whole groups, then the rest: elements, scales [groups, 1], integers [groups, _]."""
    groups, whole = -(-count // GROUP), count // GROUP
    scales = packed[: 4 * groups].view(torch.float32).view(-1, 1)
    integers = packed[4 * groups :].view(torch.int8)
    for first in range(0, whole, TILE // GROUP):
        last = min(first + TILE // GROUP, whole)
        rows = slice(first * GROUP, last * GROUP)
        yield rows, scales[first:last], integers[rows].view(-1, GROUP)
    if whole < groups:
        rows = slice(whole * GROUP, count)
        yield rows, scales[whole:], integers[rows].view(1, -1)


class _Products(TorchFunctionMode):
    """Notes when a product of an activation with a trainable weight runs."""

    inside = False

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        name = _WEIGHTS.get(func)
        weight = named(func, args, kwargs or {}).get(name) if name else None
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            self.inside = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.inside = False
        return func(*args, **(kwargs or {}))


_WEIGHTS: dict[object, str] = {
    functional.linear: "weight",
    torch.addmm: "mat2",
    torch.mm: "mat2",
    torch.matmul: "other",
}
"""The name of each function's weight. Hugging Face's Conv1D is an addmm."""


def _as_projection(
    elements: Tensor, features: int, keep: Callable[[Tensor], object]
) -> Callable[[Callable[[object], Tensor]], Tensor]:
    rows = elements.view(-1, features)
    # A spread sample of rows, at most one tile.
    sample = rows[:: max(1, rows.shape[0] * features // TILE)]
    seed = _seed(sample.sum(1, dtype=torch.float32))
    kept, kept_seed = keep(projected(rows, seed)), keep(seed)
    return lambda bring_back: rebuilt(bring_back(kept), bring_back(kept_seed), features).flatten()


def projected(rows: Tensor, seed: Tensor) -> Tensor:
    """Rows x P: [rows, features] to [rows, rank]. P [features, rank] follows from `seed`."""
    features, rank = rows.shape[1], rank_of(rows.shape[1])
    assert rank is not None
    result = rows.new_empty(rows.shape[0], rank)
    step = max(8, TILE // features)
    with torch.autocast(rows.device.type, enabled=False):
        for first in range(0, rank, step):
            columns = slice(first, min(first + step, rank))
            signs = _signs(seed, features, rank, slice(0, features), columns, rows.dtype)
            result[:, columns] = rows @ signs
    return result


def rebuilt(projection: Tensor, seed: Tensor, features: int) -> Tensor:
    """Rows x P P^T, of rows x P: [rows, rank] to [rows, features]."""
    num_rows, rank = projection.shape
    result = projection.new_empty(num_rows, features)
    step = max(8, TILE // rank)
    with torch.autocast(projection.device.type, enabled=False):
        for first in range(0, features, step):
            part = slice(first, min(first + step, features))
            signs = _signs(seed, features, rank, part, slice(0, rank), projection.dtype)
            result[:, part] = projection @ signs.T
    return result.mul_(1 / (rank * _magnitude(rank) ** 2))


def _magnitude(rank: int) -> float:
    """About 1 / sqrt(rank), exact in 16 bits: x P is of the size of x for any rank."""
    return float(2.0 ** -round((rank.bit_length() - 1) / 2))


def _signs(
    seed: Tensor, features: int, rank: int, rows: slice, columns: slice, dtype: torch.dtype
) -> Tensor:
    """A part of P: +-`_magnitude(rank)`.

    An element is the top bit of a k + b in 32 bits, for its column k and its row's random words a
    and b: pairwise independent within a row (Dietzfelbinger, STACS 1996).
    """
    words = _words(seed, 2 * features).to(torch.int32).view(2, features, 1)[:, rows]
    column = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=seed.device)
    bits = (words[0] * column).add_(words[1]).bitwise_right_shift_(31)  # 0 or -1
    size = _magnitude(rank)
    return bits.to(dtype).mul_(2 * size).add_(size)


# --- random words: [Note: random numbers without a generator] ------------------------------------


_GAMMA, _FIRST, _SECOND = (  # as int64
    word - (word >> 63 << 64)
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _seed(sums: Tensor) -> Tensor:
    """An int64 seed from float32 sums of the packed values and `SEED`."""
    bits = sums.view(torch.int32).to(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return (bits * places).sum() * _GAMMA + SEED


def _words(seed: Tensor, count: int) -> Tensor:
    """The first `count` words of SplitMix64 from `seed`: int64 [count]."""
    words = torch.arange(1, count + 1, device=seed.device) * _GAMMA + seed
    for shift, factor in ((30, _FIRST), (27, _SECOND)):  # its finalizer
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, 31)
