"""Seconds of single operators of a transformer's step on a card, beside what an estimate says.

Each operator runs alone, on tensors that no cache holds; the median of its runs by CUDA's events.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import accelerators
from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.hardware.operator_log import OperatorLog
from protrain_runtime.contract.records.hardware import DeviceKind, Rates
from protrain_runtime.devices.device import HOST

NUM_TOKENS, HIDDEN, INNER, HEADS, KEYS, VOCABULARY = 4096, 4096, 14336, 32, 8, 128256
NUM_WARMUP, NUM_RUNS = 3, 15
CACHE_BYTES = 2**28
"""More than a card's last cache holds; written between runs."""
NUM_LAUNCHED = 500

Call = Callable[[], object]
Named = Iterator[tuple[str, Call]]
DTYPES = (torch.bfloat16, torch.float32)
aten = torch.ops.aten


def kernels(device: DeviceKind) -> dict[str, Any]:
    """Rows of an operator's name, its seconds, and those of an estimate for a known card."""
    card = accelerators.found(device)
    torch.manual_seed(0)
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=card)
    seconds: dict[str, float] = {}
    for group in GROUPS:
        seconds |= {name: _seconds(call, cache) for name, call in group(card)}
        torch.cuda.empty_cache()
    return beside_estimates(seconds, torch.cuda.get_device_name(card)) | _launches(card)


def beside_estimates(seconds: dict[str, float], name: str) -> dict[str, Any]:
    """The rows of operators that were measured on a card of that name."""
    machines = [load_hardware(one) for one in hardware_names()]
    found = [machine.rates for machine in machines if machine.device.name == name]
    estimated = _estimates(found[0]) if found and found[0] else {}
    return {
        "rows": [
            {"operator": operator, "seconds": taken, "estimated_seconds": estimated.get(operator)}
            for operator, taken in seconds.items()
        ]
    }


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = OperatorLog()
        self.log.mark()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.log.note(func, args, kwargs or {}, result)
        return result


def _estimates(rates: Rates) -> dict[str, float]:
    """Seconds by name; optimizers, which estimates do not take apart, have none."""
    found: dict[str, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for group in ESTIMATED:
            for name, call in group(HOST):
                with _Noting() as noting:
                    call()
                found[name] = sum(noting.log.seconds(rates))
    return found


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seconds(call: Call, cache: Tensor) -> float:
    for _ in range(NUM_WARMUP):
        call()
    pairs = []
    for _ in range(NUM_RUNS):
        cache.zero_()  # also gives the host time to launch what follows
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    times: list[float] = sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
    return times[len(times) // 2]


def _launches(card: torch.device) -> dict[str, float]:
    """Seconds of the host for one operator: alone, under autograd, and of its backward."""
    plain, leaf = (torch.randn(8, 8, device=card, requires_grad=leaf) for leaf in (False, True))

    def chain(start: Tensor) -> Tensor:
        for _ in range(NUM_LAUNCHED):
            start = start * 1.0
        return start

    def timed(call: Call) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        ended = time.perf_counter()
        torch.cuda.synchronize()
        return (ended - start) / NUM_LAUNCHED

    last = [chain(leaf).sum() for _ in range(2)]
    return {
        "launch_s": timed(lambda: chain(plain)),
        "forward_launch_s": timed(lambda: chain(leaf)),
        "backward_launch_s": timed(lambda: last.pop().backward()),
    }


def _plain(card: torch.device) -> Named:
    for dtype in DTYPES:
        x, y = (torch.randn(NUM_TOKENS, INNER, device=card, dtype=dtype) for _ in range(2))
        yield f"clone {_named(dtype)}", x.clone
        yield f"add {_named(dtype)}", partial(torch.add, x, y)
        yield f"mul scalar {_named(dtype)}", partial(torch.mul, x, 0.5)
        yield f"silu {_named(dtype)}", partial(functional.silu, x)
        yield f"gelu {_named(dtype)}", partial(functional.gelu, x)
        yield f"silu backward {_named(dtype)}", partial(aten.silu_backward, x, y)
        yield f"pow {_named(dtype)}", partial(torch.pow, x, 2)
        yield f"mean rows {_named(dtype)}", partial(torch.mean, x, -1, keepdim=True)
        yield f"sum all {_named(dtype)}", partial(torch.sum, x)
        yield f"sum columns {_named(dtype)}", partial(torch.sum, x, 0)
        yield f"add_ {_named(dtype)}", partial(x.add_, y)
        yield f"dropout {_named(dtype)}", partial(aten.native_dropout, x, 0.1, True)


def _accessed(card: torch.device) -> Named:
    """Operands that are broadcast, strided, or of several dtypes."""
    for dtype in DTYPES:
        name = _named(dtype)
        x = torch.randn(NUM_TOKENS, INNER, device=card, dtype=dtype)
        heads = torch.randn(1, NUM_TOKENS, HEADS, 128, device=card, dtype=dtype).transpose(1, 2)
        cos = torch.randn(1, 1, NUM_TOKENS, 128, device=card, dtype=dtype)
        keys = torch.randn(1, KEYS, 1, NUM_TOKENS, 128, device=card, dtype=dtype)
        repeated = keys.expand(1, KEYS, HEADS // KEYS, NUM_TOKENS, 128)
        yield f"mul by a row {name}", partial(torch.mul, x, x[0].clone())
        yield f"mul by a column {name}", partial(torch.mul, x, x[:, :1].clone())
        yield f"clone a half of each row {name}", x[:, : INNER // 2].contiguous
        yield f"neg of a half {name}", partial(torch.neg, x[:, INNER // 2 :])
        yield f"heads times cos {name}", partial(torch.mul, heads, cos)
        yield f"heads contiguous {name}", heads.contiguous
        yield f"rotate half {name}", partial(_rotated, heads)
        yield f"repeat keys {name}", partial(repeated.reshape, 1, HEADS, NUM_TOKENS, 128)
        yield f"transpose 2d {name}", x.t().contiguous
    half = torch.randn(NUM_TOKENS, INNER, device=card, dtype=torch.bfloat16)
    full = torch.randn(NUM_TOKENS, INNER, device=card)
    yield "to float32", half.float
    yield "to bfloat16", full.bfloat16
    yield "mul of bfloat16 and float32", partial(torch.mul, half, full)
    yield "add_ of bfloat16 to float32", partial(full.add_, half)
    yield "mul of bfloat16 by a float32 column", partial(torch.mul, half, full[:, :1])
    yield "mul of bfloat16 by a float32 row", partial(torch.mul, half, full[0])


def _rotated(heads: Tensor) -> Tensor:
    return torch.cat((-heads[..., 64:], heads[..., :64]), dim=-1)


def _rows(card: torch.device) -> Named:
    """Softmax, losses, norms, embeddings."""
    for dtype in DTYPES:
        name = _named(dtype)
        for width in (4096, 32000, VOCABULARY):
            logits = torch.randn(NUM_TOKENS // 2, width, device=card, dtype=dtype)
            out = torch.log_softmax(logits, -1)
            yield f"log_softmax {width} {name}", partial(torch.log_softmax, logits, -1)
            backward = partial(aten._log_softmax_backward_data, logits, out, -1, dtype)
            yield f"log_softmax backward {width} {name}", backward
        x = torch.randn(NUM_TOKENS, HIDDEN, device=card, dtype=dtype)
        w, b = x[0].clone(), x[1].clone()
        yield f"layer_norm {name}", partial(functional.layer_norm, x, (HIDDEN,), w, b)
        _, mean, rstd = aten.native_layer_norm(x, [HIDDEN], w, b, 1e-5)
        given = (x, x, [HIDDEN], mean, rstd, w, b, [True, True, True])
        yield f"layer_norm backward {name}", partial(aten.native_layer_norm_backward, *given)
        yield f"rms_norm {name}", partial(functional.rms_norm, x, (HIDDEN,), w)
        table = torch.randn(VOCABULARY, HIDDEN, device=card, dtype=dtype)
        tokens = torch.randint(VOCABULARY, (NUM_TOKENS,), device=card)
        yield f"embedding {name}", partial(functional.embedding, tokens, table)
        looked_up = (x, tokens, VOCABULARY, -1, False)
        yield f"embedding backward {name}", partial(aten.embedding_dense_backward, *looked_up)
        targets = tokens[: NUM_TOKENS // 2]
        one = torch.tensor(1.0, device=card, dtype=dtype)
        out = torch.randn(NUM_TOKENS // 2, VOCABULARY, device=card, dtype=dtype)
        yield f"nll_loss {name}", partial(functional.nll_loss, out, targets)
        lost = (one, out, targets, None, 1, -100, one)
        yield f"nll_loss backward {name}", partial(aten.nll_loss_backward, *lost)


def _products(card: torch.device) -> Named:
    """[rows, inner] times [inner, columns], the last ones those of adapters."""
    shapes = [(rows, HIDDEN, INNER) for rows in (512, 1024, 2048, 4096, 8192)]
    shapes += [(rows, HIDDEN, HIDDEN) for rows in (512, 2048, 8192)]
    shapes += [(4096, INNER, HIDDEN), (4096, HIDDEN, 1024), (2048, HIDDEN, VOCABULARY)]
    shapes += [(2048, 2048, 8192), (4096, 576, 1536)]
    shapes += [(rows, HIDDEN, rank) for rows in (2048, 8192) for rank in (8, 16, 64)]
    shapes += [(rows, rank, INNER) for rows in (2048, 8192) for rank in (8, 16, 64)]
    shapes += [(rank, rows, INNER) for rows in (2048, 8192) for rank in (16, 64)]
    for dtype in DTYPES:
        for rows, inner, columns in shapes:
            x = torch.randn(rows, inner, device=card, dtype=dtype)
            w = torch.randn(columns, inner, device=card, dtype=dtype)
            if columns <= INNER or dtype != torch.float32:
                name = f"linear {rows} x {inner} x {columns} {_named(dtype)}"
                yield name, partial(functional.linear, x, w)


def _attention(card: torch.device) -> Named:
    for keys, width in ((2048, 128), (4096, 128), (4096, 64), (8192, 128)):
        shape = (1, HIDDEN // width, keys, width)
        q, k, v = (
            torch.randn(shape, device=card, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        forward = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield f"attention {keys} of {width}", forward
        out = forward()
        gradient = torch.randn_like(out)
        backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        yield f"attention backward {keys} of {width}", backward


def _optimizers(card: torch.device) -> Named:
    matrices = {"268 M": (16, HIDDEN, HIDDEN), "448 adapters": (448, 16, HIDDEN)}
    for dtype in DTYPES:
        for size, (number, rows, columns) in matrices.items():
            parameters = [
                nn.Parameter(torch.randn(rows, columns, device=card, dtype=dtype))
                for _ in range(number)
            ]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            fused = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
            foreach = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
            yield f"AdamW fused {size} {_named(dtype)}", fused.step
            yield f"AdamW foreach {size} {_named(dtype)}", foreach.step
            clipping = partial(nn.utils.clip_grad_norm_, parameters, 1.0)
            yield f"clip_grad_norm_ {size} {_named(dtype)}", clipping


def _packed(card: torch.device) -> Named:
    try:
        packing = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        return
    for rows, columns in ((INNER, HIDDEN), (HIDDEN, HIDDEN)):
        weight = torch.randn(rows, columns, device=card, dtype=torch.bfloat16)
        for nested, name in ((True, ""), (False, ", plain scales")):
            packed, state = packing.quantize_4bit(
                weight, quant_type="nf4", compress_statistics=nested
            )
            unpack = partial(packing.dequantize_4bit, packed, state)
            yield f"dequantize nf4 {rows} x {columns}{name}", unpack


ESTIMATED = (_plain, _accessed, _rows, _products, _attention)
GROUPS = (*ESTIMATED, _optimizers, _packed)
