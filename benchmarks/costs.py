"""What blocks and parts of a transformer cost, from their dimensions: analytic `Unit`s.

N tokens, h hidden width, q = heads * head width, kv = key-value heads * head width, f MLP width,
V vocabulary, beta = 2 bytes. Seconds are the roofline's:

    max(FLOPs / (peak FLOP/s * UTILISATION), bytes touched / memory bandwidth)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.machines import Machine
from protrain_runtime.contract.program.program import grouped
from protrain_runtime.contract.records.profile import Form, FormCost, Unit, UnitKind

LITE: Form = "lite"
ATTN: Form = "attn"

BETA = 2  # [bytes] of a bf16 activation, parameter or gradient
STATE_BYTES = 12  # per trainable parameter: fp32 master, m and v
UTILISATION = 0.5
"""Of the peak FLOP/s; 40-60 % is typical of large models (PaLM, table 3; Llama 3, table 4)."""

EARLY_STOP = 0.8
"""Recomputation with early stop, as a fraction of the forward of a gated block; 1 for others.

Measured: 78 % for a Llama layer, 100 % for one of GPT-2 (docs/decisions.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The dimensions of one transformer block, by the names of Hugging Face's configurations."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    gated: bool = True  # SwiGLU or GeGLU; else GELU or ReLU
    bias: bool = False
    experts: int = 1
    active_experts: int = 1
    window: int | None = None  # of local attention
    post_norms: bool = False  # normalised again before each residual addition
    cross: bool = False  # also attends to an encoder's output of as many tokens

    @property
    def q(self) -> int:
        return self.heads * self.head_width

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def attention_parameters(self) -> int:
        """q, k, v and output projections, of self and cross attention."""
        one = self.hidden * (2 * self.q + 2 * self.kv)
        if self.bias:
            one += self.q + 2 * self.kv + self.hidden
        return one * (2 if self.cross else 1)

    @property
    def expert_parameters(self) -> int:
        """One expert's, or the MLP's."""
        bias = self.mlp + self.hidden if self.bias else 0
        return (3 if self.gated else 2) * self.hidden * self.mlp + bias

    @property
    def parameters(self) -> int:
        """All of the block's, all experts' included."""
        norms = (2 + 2 * self.post_norms + self.cross) * self.hidden * (2 if self.bias else 1)
        router = self.hidden * self.experts if self.experts > 1 else 0
        mlp = self.experts * self.expert_parameters
        return self.attention_parameters + mlp + router + norms

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self.attention_parameters + self.active_experts * self.expert_parameters

    def tensors(self) -> tuple[int, ...]:
        """Elements of the large parameters in order: q, k, v, output, then the MLP's matrices.

        Norms and biases are counted with the first one.
        """
        attention = [self.hidden * width for width in (self.q, self.kv, self.kv, self.q)]
        attention *= 2 if self.cross else 1
        # Experts are one tensor per matrix.
        mlp = [self.experts * self.hidden * self.mlp] * (3 if self.gated else 2)
        rest = self.parameters - sum(attention) - sum(mlp)
        return (attention[0] + rest, *attention[1:], *mlp)

    def adapter_parameters(self, rank: int) -> int:
        """LoRA on every linear module: rank * (in + out) each."""
        attention = 2 * (self.hidden + self.q) + 2 * (self.hidden + self.kv)
        mlp = (3 if self.gated else 2) * (self.hidden + self.mlp) * self.experts
        return rank * (attention * (2 if self.cross else 1) + mlp)

    def mean_context(self, seq_len: int) -> float:
        """Tokens that a token attends to, on average, with a causal mask.

        s / 2, or w - w^2 / 2s with a window of w < s. (Bidirectional attention is counted so too.)
        """
        if self.window is None or self.window >= seq_len:
            return seq_len / 2
        return self.window - self.window**2 / (2 * seq_len)

    def saved_bytes(self, tokens: int) -> tuple[int, ...]:
        """`kept_bytes`, storage by storage in the order of the forward."""
        attention = [self.hidden, self.q, self.kv, self.kv, self.q]
        widths = [self.hidden, *attention]
        if self.cross:
            widths += [self.hidden, *attention]
        widths += [self.hidden]
        for _ in range(self.active_experts):
            widths += [self.hidden, *[self.mlp] * (4 if self.gated else 2)]
        if self.post_norms:
            widths += [self.hidden] * 2
        logsumexp = tokens * 4 * self.heads * (2 if self.cross else 1)
        return (*(tokens * width * BETA for width in widths), logsumexp)

    def lite_bytes(self, tokens: int) -> int:
        """What the form lite keeps: neither normed h nor results of activation functions."""
        norms = 1 + self.active_experts + self.cross + 2 * self.post_norms
        results = self.active_experts * (2 if self.gated else 1) * self.mlp
        return self.kept_bytes(tokens) - tokens * (norms * self.hidden + results) * BETA

    def attn_bytes(self, tokens: int) -> int:
        """What the form attn keeps: the input, q, k, v, and the attention's output."""
        width = self.hidden + (2 * self.q + 2 * self.kv) * (2 if self.cross else 1)
        return tokens * (width * BETA + 4 * self.heads * (2 if self.cross else 1))

    def kept_bytes(self, tokens: int) -> int:
        """What autograd saves of a pre-norm block with flash-style attention.

        Attention: input h, normed h, queries q, keys kv, values kv, output q, and the fp32
        logsumexp per head. MLP: residual h, and per active expert its input h and 4f (gate, up,
        act(gate), product) or 2f (up, act(up)). With q = kv = h: N(8h + 4f) beta, or 16 N h beta
        for a GPT block with f = 4h (docs/decisions.md). Post-norms keep their inputs, h
        each; cross attention normed h, q, k, v, its output and a residual.
        """
        width = 3 * self.hidden + 2 * self.q + 2 * self.kv
        logsumexp = 4 * self.heads
        if self.cross:
            width += 2 * self.hidden + 2 * self.q + 2 * self.kv
            logsumexp *= 2
        width += self.active_experts * (self.hidden + (4 if self.gated else 2) * self.mlp)
        if self.post_norms:
            width += 2 * self.hidden
        return tokens * (width * BETA + logsumexp)


def block_unit(
    name: str,
    index: int,
    block: Block,
    machine: Machine,
    *,
    batch_size: int,
    seq_len: int,
    adapter_rank: int,
) -> Unit:
    """A block in the forms keep, lite, attn, full; with `adapter_rank` only adapters are trained.

    Forward FLOPs: 2 N parameters + 4 N context q. Backward: twice that, but once for the linear
    modules whose weights are frozen.
    """
    tokens = batch_size * seq_len
    trained = block.adapter_parameters(adapter_rank) if adapter_rank else block.parameters
    all_parameters = block.parameters + (trained if adapter_rank else 0)
    parameter_bytes, gradient = all_parameters * BETA, trained * BETA
    kept, entering = block.kept_bytes(tokens), tokens * block.hidden * BETA
    f_bytes = tokens * block.mlp * block.active_experts * BETA
    linear = 2 * tokens * block.active_parameters
    adapters = 2 * tokens * trained if adapter_rank else 0
    attention = 4 * tokens * block.mean_context(seq_len) * block.q * (2 if block.cross else 1)
    forward_s = _seconds(
        machine, flops=linear + adapters + attention, touched=parameter_bytes + kept
    )
    backward_s = _seconds(
        machine,
        flops=(1 if adapter_rank else 2) * linear + 2 * (adapters + attention),
        touched=parameter_bytes + gradient + kept,
    )
    again = EARLY_STOP if block.gated else 1.0
    keep = FormCost(
        form="keep",
        forward_peak_bytes=kept + f_bytes,
        kept_bytes=kept,
        backward_peak_bytes=gradient + 2 * f_bytes,
        swappable_bytes=kept,
        forward_s=forward_s,
        backward_s=backward_s,
        swap_pieces=_pieces(block.saved_bytes(tokens)),
    )
    # What is computed again: reading and writing what was dropped; for attn, also the output
    # projection and all of the MLP but its last matrix.
    lite_bytes, attn_bytes = block.lite_bytes(tokens), block.attn_bytes(tokens)
    dropped = 2 * (kept - lite_bytes)
    last = block.active_experts * block.hidden * block.mlp
    projected = block.hidden * block.q * (2 if block.cross else 1)
    again_parameters = projected + block.active_experts * block.expert_parameters - last
    parts = [
        replace(
            keep,
            form=form,
            kept_bytes=form_kept,
            backward_peak_bytes=keep.backward_peak_bytes + kept - form_kept,
            swappable_bytes=form_kept,
            swap_pieces=_pieces([form_kept // 4] * 3 + [form_kept - 3 * (form_kept // 4)]),
            backward_s=backward_s + _seconds(machine, flops=flops, touched=touched),
        )
        for form, form_kept, flops, touched in (
            (LITE, lite_bytes, 0, dropped),
            (ATTN, attn_bytes, 2 * tokens * again_parameters, dropped),
        )
    ]
    full = FormCost(
        form="full",
        # Without autograd: input, attention's tensors, or gate, up and product.
        forward_peak_bytes=entering + 4 * tokens * block.hidden * BETA + 3 * f_bytes,
        kept_bytes=entering,
        backward_peak_bytes=gradient + 2 * f_bytes + kept - entering,
        swappable_bytes=entering,
        forward_s=forward_s,
        backward_s=backward_s + again * forward_s,
    )
    return _unit(
        name,
        kind="block",
        trained=trained,
        parameter_bytes=parameter_bytes,
        used_by=(index,),
        forms=(keep, *parts, full),
        tensors=block.tensors() if not adapter_rank else (),
    )


def lookup_unit(
    name: str,
    machine: Machine,
    *,
    parameters: int,
    tokens: int,
    kept_width: int,
    trained: bool,
    used_by: tuple[int, ...],
) -> Unit:
    """An embedding: keeps its result, N kept_width beta; bound by memory."""
    kept = tokens * kept_width * BETA
    gradient = parameters * BETA if trained else 0
    cost = FormCost(
        form="keep",
        forward_peak_bytes=kept,
        kept_bytes=kept,
        backward_peak_bytes=gradient,
        swappable_bytes=0,
        forward_s=_seconds(machine, flops=0, touched=2 * kept),
        backward_s=_seconds(machine, flops=0, touched=kept + gradient),
    )
    return _unit(
        name,
        kind="part",
        trained=parameters if trained else 0,
        parameter_bytes=parameters * BETA,
        used_by=used_by if parameters else (),
        forms=(cost,),
    )


def projector_unit(
    name: str, index: int, machine: Machine, *, widths: tuple[int, ...], tokens: int, trained: bool
) -> Unit:
    """Linear modules with GELU between: keeps every input, and GELU's."""
    parameters = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    gradient = parameters * BETA if trained else 0
    kept = tokens * (widths[0] + 2 * sum(widths[1:-1]) + widths[-1]) * BETA
    flops = 2 * tokens * parameters
    cost = FormCost(
        form="keep",
        forward_peak_bytes=kept,
        kept_bytes=kept,
        backward_peak_bytes=gradient + 2 * tokens * max(widths) * BETA,
        swappable_bytes=0,
        forward_s=_seconds(machine, flops=flops, touched=parameters * BETA + kept),
        backward_s=_seconds(machine, flops=2 * flops, touched=2 * parameters * BETA + kept),
    )
    return _unit(
        name,
        kind="part",
        trained=parameters if trained else 0,
        parameter_bytes=parameters * BETA,
        used_by=(index,),
        forms=(cost,),
    )


def head_unit(
    index: int,
    machine: Machine,
    *,
    hidden: int,
    vocabulary: int,
    tied: bool,
    tokens: int,
    trained: bool,
) -> Unit:
    """Final norm, head and cross entropy; holds N V (beta + 8) at its highest.

    After forward: logits in bf16 and fp32, and the norm's input and output. Backward adds the fp32
    gradient of the logits (docs/decisions.md).
    """
    logits = tokens * vocabulary
    parameters = hidden + (0 if tied else hidden * vocabulary)
    gradient = parameters * BETA if trained else 0
    table_gradient = hidden * vocabulary * BETA if tied and trained else 0  # made here first
    kept = logits * (BETA + 4) + 2 * tokens * hidden * BETA
    flops = 2 * logits * hidden
    weight = hidden * vocabulary * BETA
    cost = FormCost(
        form="keep",
        forward_peak_bytes=kept + logits * 4,
        kept_bytes=kept,
        backward_peak_bytes=gradient + table_gradient + logits * 4,
        swappable_bytes=0,
        forward_s=_seconds(machine, flops=flops, touched=weight + kept),
        backward_s=_seconds(
            machine, flops=(2 if trained else 1) * flops, touched=weight + gradient + kept
        ),
    )
    return _unit(
        "head",
        kind="part",
        trained=parameters if trained else 0,
        parameter_bytes=parameters * BETA,
        used_by=(index,),
        forms=(cost,),
    )


def _seconds(machine: Machine, *, flops: float, touched: int) -> float:
    return max(flops / (machine.flops_per_s * UTILISATION), touched / machine.memory_bytes_per_s)


def _unit(
    name: str,
    *,
    kind: UnitKind,
    trained: int,
    parameter_bytes: int,
    used_by: tuple[int, ...],
    forms: tuple[FormCost, ...],
    tensors: tuple[int, ...] = (),
) -> Unit:
    pieces = _pieces([size * BETA for size in tensors])
    return Unit(
        name=name,
        kind=kind,
        num_parameters=trained,
        parameter_bytes=parameter_bytes,
        gradient_bytes=trained * BETA,
        state_bytes=trained * STATE_BYTES,
        used_by=used_by,
        forms=forms,
        parameter_pieces=pieces,
        gradient_pieces=pieces,
    )


def _pieces(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(sizes[group.start : group.stop]) for group in grouped(sizes))
