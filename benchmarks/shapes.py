"""Published models as analytic profiles: dimensions from their Hugging Face configurations."""

import json
from dataclasses import asdict, dataclass, replace
from typing import assert_never

from benchmarks.costs import Block, block_unit, head_unit, lookup_unit, projector_unit
from benchmarks.machines import Machine
from protrain_runtime.contract.records.profile import OptimizerCost, Profile, Unit, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An embedding of `rows` rows (words and positions), or another use of the first one's."""

    name: str = "embedding"
    rows: int
    width: int
    tokens: int | None = None  # per sequence; None: the workload's
    shared: bool = False  # reads the first unit's table, and keeps an encoder's output besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """`count` blocks that repeat a pattern."""

    name: str = "layers"
    count: int
    pattern: tuple[Block, ...]
    tokens: int | None = None  # per sequence; None: the workload's


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """Linear modules between two stacks."""

    widths: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Final norm, output projection and loss."""

    hidden: int
    vocabulary: int
    tied: bool = False  # projects with the first unit's table


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and the workload it is trained with: `small_batch` on cards of up to 24 GB."""

    name: str
    source: str  # the configuration on huggingface.co
    parts: tuple[Lookup | Stack | Projector | Head, ...]
    seq_len: int = 4096
    small_batch: int = 1
    batch: int = 4
    adapter_rank: int = 0  # LoRA; 0: everything is trained

    def batch_size(self, machine: Machine) -> int:
        """Sequences per step, so that activations matter beside the states."""
        small = machine.hardware.device.memory_bytes <= 24 * 10**9
        return self.small_batch if small else self.batch


def profile(shape: Shape, machine: Machine, *, batch_size: int, seq_len: int) -> Profile:
    """What `shape` costs on `machine`, by the formulas of `benchmarks.costs`."""
    trained = shape.adapter_rank == 0
    users = _table_users(shape)
    units: list[Unit] = []
    for part in shape.parts:
        match part:
            case Lookup():
                tokens = batch_size * (part.tokens or seq_len)
                units.append(
                    lookup_unit(
                        part.name,
                        machine,
                        parameters=0 if part.shared else part.rows * part.width,
                        tokens=tokens,
                        kept_width=part.width * (2 if part.shared else 1),
                        trained=trained,
                        used_by=users if not units else (len(units),),
                    )
                )
            case Stack():
                units += [
                    block_unit(
                        f"{part.name}.{n}",
                        len(units) + n,
                        part.pattern[n % len(part.pattern)],
                        machine,
                        batch_size=batch_size,
                        seq_len=part.tokens or seq_len,
                        adapter_rank=shape.adapter_rank,
                    )
                    for n in range(part.count)
                ]
            case Projector():
                units.append(
                    projector_unit(
                        "projector",
                        len(units),
                        machine,
                        widths=part.widths,
                        tokens=batch_size * part.tokens,
                        trained=trained,
                    )
                )
            case Head():
                units.append(
                    head_unit(
                        len(units),
                        machine,
                        hidden=part.hidden,
                        vocabulary=part.vocabulary,
                        tied=part.tied,
                        tokens=batch_size * seq_len,
                        trained=trained,
                    )
                )
            case _:
                assert_never(part)
    return Profile(
        workload=Workload(
            model=shape.name,
            model_config=json.dumps(asdict(shape), sort_keys=True, separators=(",", ":")),
            batch_size=batch_size,
            seq_len=seq_len,
            dtype="bfloat16",
            device="cuda",
            seed=0,
        ),
        hardware=machine.hardware,
        method="estimated",
        model_fingerprint=f"analytic:{shape.name}",
        optimizer=OptimizerCost(
            name="adamw",
            host_parameters_per_s=machine.host_parameters_per_s,
            device_parameters_per_s=machine.device_parameters_per_s,
            workspace_fraction=0.0,
        ),
        base_bytes=2 * 8 * batch_size * seq_len,  # token ids and labels, int64
        units=tuple(units),
    )


def _table_users(shape: Shape) -> tuple[int, ...]:
    """The units that read the first unit's table."""
    users, index = [0], 0
    for part in shape.parts:
        if (isinstance(part, Lookup) and part.shared) or (isinstance(part, Head) and part.tied):
            users.append(index)
        index += part.count if isinstance(part, Stack) else 1
    return tuple(users)


def _decoder(
    name: str,
    source: str,
    block: Block,
    *,
    layers: int,
    vocabulary: int,
    positions: int = 0,
    tied: bool = False,
    local: Block | None = None,
    seq_len: int = 4096,
    small_batch: int = 1,
    batch: int = 4,
) -> Shape:
    """An embedding, blocks (`local` and `block` in turn) and a head."""
    return Shape(
        name=name,
        source=source,
        parts=(
            Lookup(rows=vocabulary + positions, width=block.hidden),
            Stack(count=layers, pattern=(local, block) if local else (block,)),
            Head(hidden=block.hidden, vocabulary=vocabulary, tied=tied),
        ),
        seq_len=seq_len,
        small_batch=small_batch,
        batch=batch,
    )


LLAMA_2_7B = _decoder(
    "llama-2-7b",
    "meta-llama/Llama-2-7b-hf",
    Block(hidden=4096, mlp=11008, heads=32, kv_heads=32, head_width=128),
    layers=32,
    vocabulary=32000,
)
LLAMA_2_13B_BLOCK = Block(hidden=5120, mlp=13824, heads=40, kv_heads=40, head_width=128)
LLAMA_3_70B = _decoder(
    "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B",
    Block(hidden=8192, mlp=28672, heads=64, kv_heads=8, head_width=128),
    layers=80,
    vocabulary=128256,
)
GEMMA_BLOCK = Block(hidden=4608, mlp=36864, heads=32, kv_heads=16, head_width=128, post_norms=True)
T5_ENCODER = Block(hidden=1024, mlp=65536, heads=128, kv_heads=128, head_width=128, gated=False)
VIT_BLOCK = Block(
    hidden=1024, mlp=4096, heads=16, kv_heads=16, head_width=64, gated=False, bias=True
)

SHAPES: tuple[Shape, ...] = (
    _decoder(
        "gpt2-xl",
        "openai-community/gpt2-xl",
        Block(hidden=1600, mlp=6400, heads=25, kv_heads=25, head_width=64, gated=False, bias=True),
        layers=48,
        vocabulary=50257,
        positions=1024,
        tied=True,
        seq_len=1024,
        small_batch=8,
        batch=32,
    ),
    LLAMA_2_7B,
    _decoder(
        "mistral-7b",
        "mistralai/Mistral-7B-v0.1",
        Block(hidden=4096, mlp=14336, heads=32, kv_heads=8, head_width=128, window=4096),
        layers=32,
        vocabulary=32000,
    ),
    _decoder(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
        Block(hidden=4096, mlp=14336, heads=32, kv_heads=8, head_width=128),
        layers=32,
        vocabulary=128256,
    ),
    replace(LLAMA_2_7B, name="llama-2-7b-lora", adapter_rank=16),
    Shape(
        name="t5-11b",
        source="google-t5/t5-11b",
        parts=(
            Lookup(rows=32128, width=1024),
            Stack(name="encoder", count=24, pattern=(T5_ENCODER,)),
            Lookup(name="decoder.embedding", rows=0, width=1024, shared=True),
            Stack(name="decoder", count=24, pattern=(replace(T5_ENCODER, cross=True),)),
            Head(hidden=1024, vocabulary=32128, tied=True),
        ),
        seq_len=512,
        small_batch=4,
        batch=16,
    ),
    _decoder(
        "llama-2-13b",
        "meta-llama/Llama-2-13b-hf",
        LLAMA_2_13B_BLOCK,
        layers=40,
        vocabulary=32000,
    ),
    Shape(
        name="llava-1.5-13b",
        source="llava-hf/llava-1.5-13b-hf (vision: openai/clip-vit-large-patch14-336)",
        parts=(
            # 14 x 14 x 3 values per patch, 577 positions, a class token; all parts are trained.
            Lookup(name="vision.embedding", rows=14 * 14 * 3 + 577 + 1, width=1024, tokens=577),
            Stack(name="vision", count=24, pattern=(VIT_BLOCK,), tokens=577),
            Projector(widths=(1024, 5120, 5120), tokens=577),
            Lookup(rows=32064, width=5120),
            Stack(count=40, pattern=(LLAMA_2_13B_BLOCK,)),
            Head(hidden=5120, vocabulary=32064),
        ),
    ),
    _decoder(
        "gemma-2-27b",
        "google/gemma-2-27b",
        GEMMA_BLOCK,
        local=replace(GEMMA_BLOCK, window=4096),
        layers=46,
        vocabulary=256000,
        tied=True,
        seq_len=8192,  # above the window, so that the two kinds of blocks differ
        batch=2,
    ),
    _decoder(
        "opt-30b",
        "facebook/opt-30b",
        Block(
            hidden=7168, mlp=28672, heads=56, kv_heads=56, head_width=128, gated=False, bias=True
        ),
        layers=48,
        vocabulary=50272,
        positions=2050,
        tied=True,
        seq_len=2048,
        small_batch=2,
        batch=8,
    ),
    _decoder(
        "qwen2.5-32b",
        "Qwen/Qwen2.5-32B",
        Block(hidden=5120, mlp=27648, heads=40, kv_heads=8, head_width=128),  # qkv bias left out
        layers=64,
        vocabulary=152064,
    ),
    _decoder(
        "mixtral-8x7b",
        "mistralai/Mixtral-8x7B-v0.1",
        Block(
            hidden=4096,
            mlp=14336,
            heads=32,
            kv_heads=8,
            head_width=128,
            experts=8,
            active_experts=2,
        ),
        layers=32,
        vocabulary=32000,
    ),
    LLAMA_3_70B,
    replace(LLAMA_3_70B, name="llama-3.1-70b-lora", adapter_rank=16),
    _decoder(
        "llama-3.1-405b",
        "meta-llama/Llama-3.1-405B",
        Block(hidden=16384, mlp=53248, heads=128, kv_heads=8, head_width=128),
        layers=126,
        vocabulary=128256,
    ),
)
