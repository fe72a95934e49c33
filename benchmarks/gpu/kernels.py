"""Seconds of single operators of a transformer's step on a card: what estimates rest on.

Each operator runs alone, on tensors that no cache holds; the median of its runs by CUDA's events.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import accelerators
from protrain_runtime.contract.records.hardware import DeviceKind

NUM_TOKENS, HIDDEN, INNER, HEADS, KEYS, VOCABULARY = 4096, 4096, 14336, 32, 8, 128256
NUM_WARMUP, NUM_RUNS = 3, 15
CACHE_BYTES = 2**28
"""More than a card's last cache holds; written between runs."""

Call = Callable[[], object]
BF16, FP32 = torch.bfloat16, torch.float32


def kernels(device: DeviceKind) -> dict[str, Any]:
    """Rows of an operator's name and its seconds."""
    card = accelerators.found(device)
    torch.manual_seed(0)
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=card)
    rows = []
    for group in GROUPS:
        for name, call in group(card):
            rows.append({"operator": name, "seconds": _seconds(call, cache)})
        torch.cuda.empty_cache()
    return {"rows": rows, "launch_seconds": _launches(card)}


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
    times = sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
    return times[len(times) // 2]


def _launches(card: torch.device) -> dict[str, float]:
    """Seconds of the host for one operator: plain, under autograd, and with its backward."""
    import time

    small = torch.randn(8, 8, device=card)
    leaf = torch.randn(8, 8, device=card, requires_grad=True)

    def timed(call: Call, operators: int) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        ended = time.perf_counter()
        torch.cuda.synchronize()
        return (ended - start) / operators

    def chain(start: Tensor) -> Tensor:
        for _ in range(500):
            start = start * 1.0
        return start

    result = {"plain": timed(lambda: chain(small), 500), "forward": timed(lambda: chain(leaf), 500)}
    last = [chain(leaf) for _ in range(2)]
    result["backward"] = timed(lambda: last.pop().sum().backward(), 500)
    return result


def _plain(card: torch.device) -> Iterator[tuple[str, Call]]:
    for dtype in (BF16, FP32):
        x, y = (torch.randn(NUM_TOKENS, INNER, device=card, dtype=dtype) for _ in range(2))
        name = str(dtype).removeprefix("torch.")
        yield f"clone {name}", x.clone
        yield f"add {name}", lambda x=x, y=y: x + y
        yield f"mul scalar {name}", lambda x=x: x * 0.5
        yield f"silu {name}", lambda x=x: F.silu(x)
        yield f"gelu {name}", lambda x=x: F.gelu(x)
        yield f"silu backward {name}", lambda x=x, y=y: torch.ops.aten.silu_backward(x, y)
        yield f"pow {name}", lambda x=x: x.pow(2)
        yield f"mean rows {name}", lambda x=x: x.mean(-1, keepdim=True)
        yield f"sum all {name}", lambda x=x: x.sum()
        yield f"sum columns {name}", lambda x=x: x.sum(0)
        yield f"add_ {name}", lambda x=x, y=y: x.add_(y)
        yield f"dropout {name}", lambda x=x: torch.ops.aten.native_dropout(x, 0.1, True)


def _accessed(card: torch.device) -> Iterator[tuple[str, Call]]:
    """Operands that are broadcast, strided, or of several dtypes."""
    for dtype in (BF16, FP32):
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(NUM_TOKENS, INNER, device=card, dtype=dtype)
        row, column = x[0].clone(), x[:, :1].clone()
        yield f"mul by a row {name}", lambda x=x, row=row: x * row
        yield f"mul by a column {name}", lambda x=x, column=column: x * column
        yield f"clone a half of each row {name}", lambda x=x: x[:, : INNER // 2].contiguous()
        yield f"neg of a half {name}", lambda x=x: -x[:, INNER // 2 :]
        heads = torch.randn(1, NUM_TOKENS, HEADS, 128, device=card, dtype=dtype).transpose(1, 2)
        cos = torch.randn(1, 1, NUM_TOKENS, 128, device=card, dtype=dtype)
        yield f"heads times cos {name}", lambda h=heads, c=cos: h * c
        yield f"heads contiguous {name}", heads.contiguous
        yield (
            f"rotate half {name}",
            lambda h=heads: torch.cat((-h[..., 64:], h[..., :64]), dim=-1),
        )
        few = torch.randn(1, KEYS, NUM_TOKENS, 128, device=card, dtype=dtype)
        yield (
            f"repeat keys {name}",
            lambda f=few: (
                f[:, :, None]
                .expand(1, KEYS, HEADS // KEYS, NUM_TOKENS, 128)
                .reshape(1, HEADS, NUM_TOKENS, 128)
            ),
        )
        yield f"transpose 2d {name}", lambda x=x: x.t().contiguous()
    half = torch.randn(NUM_TOKENS, INNER, device=card, dtype=BF16)
    full = torch.randn(NUM_TOKENS, INNER, device=card)
    yield "to float32", half.float
    yield "to bfloat16", full.bfloat16
    yield "mul of bfloat16 and float32", lambda: half * full
    yield "add_ of bfloat16 to float32", lambda: full.add_(half)
    yield "mul of bfloat16 by a float32 column", lambda: half * full[:, :1]
    yield "mul of bfloat16 by a float32 row", lambda: half * full[0]


def _rows(card: torch.device) -> Iterator[tuple[str, Call]]:
    """Softmax, losses, norms, embeddings."""
    for dtype in (BF16, FP32):
        name = str(dtype).removeprefix("torch.")
        for width in (4096, 32000, VOCABULARY):
            logits = torch.randn(NUM_TOKENS // 2, width, device=card, dtype=dtype)
            out = torch.log_softmax(logits, -1)
            yield f"log_softmax {width} {name}", lambda x=logits: torch.log_softmax(x, -1)
            yield (
                f"log_softmax backward {width} {name}",
                lambda x=logits, o=out, d=dtype: torch.ops.aten._log_softmax_backward_data(
                    x, o, -1, d
                ),
            )
        x = torch.randn(NUM_TOKENS, HIDDEN, device=card, dtype=dtype)
        w, b = x[0].clone(), x[1].clone()
        yield f"layer_norm {name}", lambda x=x, w=w, b=b: F.layer_norm(x, (HIDDEN,), w, b)
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, [HIDDEN], w, b, 1e-5)
        yield (
            f"layer_norm backward {name}",
            lambda x=x, m=mean, r=rstd, w=w, b=b: torch.ops.aten.native_layer_norm_backward(
                x, x, [HIDDEN], m, r, w, b, [True, True, True]
            ),
        )
        yield f"rms_norm {name}", lambda x=x, w=w: F.rms_norm(x, (HIDDEN,), w)
        table = torch.randn(VOCABULARY, HIDDEN, device=card, dtype=dtype)
        tokens = torch.randint(VOCABULARY, (NUM_TOKENS,), device=card)
        yield f"embedding {name}", lambda t=table, i=tokens: F.embedding(i, t)
        yield (
            f"embedding backward {name}",
            lambda x=x, i=tokens: torch.ops.aten.embedding_dense_backward(
                x, i, VOCABULARY, -1, False
            ),
        )
        targets = tokens[: NUM_TOKENS // 2]
        total = torch.tensor(1.0, device=card, dtype=dtype)
        loss = torch.tensor(1.0, device=card, dtype=dtype)
        out = torch.randn(NUM_TOKENS // 2, VOCABULARY, device=card, dtype=dtype)
        yield f"nll_loss {name}", lambda o=out, t=targets: F.nll_loss(o, t)
        yield (
            f"nll_loss backward {name}",
            lambda o=out, t=targets, n=total, g=loss: torch.ops.aten.nll_loss_backward(
                g, o, t, None, 1, -100, n
            ),
        )


def _products(card: torch.device) -> Iterator[tuple[str, Call]]:
    shapes = [(rows, HIDDEN, INNER) for rows in (512, 1024, 2048, 4096, 8192)]
    shapes += [(rows, HIDDEN, HIDDEN) for rows in (512, 2048, 8192)]
    shapes += [(4096, INNER, HIDDEN), (4096, HIDDEN, 1024), (2048, HIDDEN, VOCABULARY)]
    shapes += [(HIDDEN, 4096, INNER), (2048, 2048, 8192), (4096, 576, 1536)]
    shapes += [(rows, HIDDEN, rank) for rows in (2048, 8192) for rank in (8, 16, 64)]
    shapes += [(rows, rank, INNER) for rows in (2048, 8192) for rank in (8, 16, 64)]
    shapes += [(rank, rows, INNER) for rows in (2048, 8192) for rank in (16, 64)]
    for dtype in (BF16, FP32):
        name = str(dtype).removeprefix("torch.")
        for rows, inner, columns in shapes:
            if dtype == FP32 and columns > INNER:
                continue
            x = torch.randn(rows, inner, device=card, dtype=dtype)
            w = torch.randn(columns, inner, device=card, dtype=dtype)
            yield f"linear {rows} x {inner} x {columns} {name}", lambda x=x, w=w: F.linear(x, w)


def _attention(card: torch.device) -> Iterator[tuple[str, Call]]:
    for keys, width in ((2048, 128), (4096, 128), (4096, 64), (8192, 128)):
        q, k, v = (
            torch.randn(1, 4096 // width, keys, width, device=card, dtype=BF16, requires_grad=True)
            for _ in range(3)
        )
        yield (
            f"attention {keys} of {width}",
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        yield (
            f"attention backward {keys} of {width}",
            lambda o=out, g=gradient, q=q, k=k, v=v: torch.autograd.grad(
                o, (q, k, v), g, retain_graph=True
            ),
        )


def _optimizers(card: torch.device) -> Iterator[tuple[str, Call]]:
    for dtype in (BF16, FP32):
        name = str(dtype).removeprefix("torch.")
        parameters = [
            torch.randn(HIDDEN, HIDDEN, device=card, dtype=dtype, requires_grad=True)
            for _ in range(16)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for kind in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, **kind)
            yield f"AdamW {kind} 268 M {name}", optimizer.step
        yield (
            f"clip_grad_norm_ 268 M {name}",
            lambda p=parameters: torch.nn.utils.clip_grad_norm_(p, 1.0),
        )
        small = [
            torch.randn(16, HIDDEN, device=card, dtype=dtype, requires_grad=True)
            for _ in range(448)
        ]
        for parameter in small:
            parameter.grad = torch.randn_like(parameter)
        for kind in ({"fused": True}, {"foreach": True}):
            optimizer = torch.optim.AdamW(small, lr=1e-4, **kind)
            yield f"AdamW {kind} 448 adapters {name}", optimizer.step
        yield (
            f"clip_grad_norm_ 448 adapters {name}",
            lambda p=small: torch.nn.utils.clip_grad_norm_(p, 1.0),
        )


def _packed(card: torch.device) -> Iterator[tuple[str, Call]]:
    try:
        from bitsandbytes import functional
    except ImportError:
        return
    for rows, columns in ((INNER, HIDDEN), (HIDDEN, HIDDEN)):
        weight = torch.randn(rows, columns, device=card, dtype=BF16)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        yield (
            f"dequantize nf4 {rows} x {columns}",
            lambda p=packed, s=state: functional.dequantize_4bit(p, s),
        )
        plain, one = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
        yield (
            f"dequantize nf4 {rows} x {columns}, plain statistics",
            lambda p=plain, s=one: functional.dequantize_4bit(p, s),
        )


GROUPS = (_plain, _accessed, _rows, _products, _attention, _optimizers, _packed)
