"""Adapters as texts: small trainable layers that are added to a model whose own are frozen.

A user says `--lora r=16,dropout=0.05`, and a record says
`adapter: lora r=16 dtype=float32 dropout=0.05`. Both are one grammar, read by one parser. They
differ in the dtype that is meant where none is said: the option has PEFT's default, and a record
means the base model's, which was the only one when the first records with adapters were written.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.tree import Document

ALL_LINEAR = "all-linear"
AdapterDType = Literal["float32", "base"]
"""float32: what PEFT makes of adapters of a 16-bit model; base: that of the adapted layer."""
Biases = Literal["none", "all", "lora_only"]
Projection = Literal["batch_average", "batch_average_once", "random"]
"""The vector of VeLoRA in PEFT's words: the mean of each batch, of the first one, or chance."""

_KIND = "lora"
_DTYPE_OF_RECORDS: AdapterDType = "base"
_DTYPE_OF_OPTIONS: AdapterDType = "float32"
_FLAGS = ("rslora", "dora")
_ALONE: dict[str, str] = {"velora": "batch_average"}
"""Values of keys that are said without one."""
_PEFT_KEYS = {
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "use_dora": "dora",
}
"""Names of our keys in PEFT's `LoraConfig`."""
_Name = Annotated[
    str,
    Meta(pattern=r"^[\w-]+(\.[\w-]+)*\Z", description="names of modules, joined by +"),
]


class Lora(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"rank": "r"},
):
    """Low-rank adapters (arXiv 2106.09685): W x + scale B A x, with A and B trained.

    rank             r: rows of A, columns of B
    alpha            scale = alpha / r, or alpha / sqrt(r) with `rslora` (arXiv 2312.03732)
    targets          ends of modules' names, or `all-linear`: what PEFT takes that to be
    dtype            of the adapters of a 16-bit model
    dropout          probability with which an element of x is 0 on the adapter's way
    dora             a trained magnitude per output besides (arXiv 2402.09353)
    velora           A's gradient is of the input projected on one direction for each group of 64
                     (arXiv 2405.17991, as PEFT has it), and which; empty: of the input
    bias             which biases of the model are trained, too
    modules_to_save  ends of names of modules of which a copy is trained
    freeze           `A`: A stays as it was drawn (LoRA-FA, arXiv 2308.03303)
    """

    rank: Annotated[int, Meta(ge=1, le=999_999)]
    alpha: Annotated[int, Meta(ge=1, le=999_999)] = 0  # as written: twice the rank
    targets: tuple[_Name, ...] = (ALL_LINEAR,)
    dtype: AdapterDType = _DTYPE_OF_OPTIONS
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    rslora: bool = False
    dora: bool = False
    velora: Literal["", Projection] = ""
    bias: Biases = "none"
    modules_to_save: tuple[_Name, ...] = ()
    freeze: Literal["", "A"] = ""

    def __str__(self) -> str:
        """For `Workload.adapter`: `lora r=16 dtype=float32`."""
        return " ".join((_KIND, *self._words(_DTYPE_OF_RECORDS)))

    @property
    def option(self) -> str:
        """For `--lora`: `r=16`."""
        return ",".join(self._words(_DTYPE_OF_OPTIONS))

    def _words(self, dtype: AdapterDType) -> list[str]:
        """The rank, and what differs from the defaults, of which `dtype` is one."""
        words, defaults = list[str](), {"alpha": 2 * self.rank, "dtype": dtype}
        for field in msgspec.structs.fields(self):
            key, value = field.encode_name, getattr(self, field.name)
            if value != defaults.get(key, field.default):
                is_alone = value is True or value == _ALONE.get(key)
                text = "+".join(value) if isinstance(value, tuple) else value
                words.append(key if is_alone else f"{key}={text}")
        return words


def parse_lora(text: str) -> Lora:
    """Parse `--lora r=16[,alpha=32][,targets=q_proj+v_proj]...`; ProtrainError for another text."""
    return _read(text.split(","), "--lora", _DTYPE_OF_OPTIONS)


def read_adapter(text: str) -> Lora | None:
    """Parse a record's `Workload.adapter`; None if empty; ProtrainError for another text."""
    if not text:
        return None
    kind, *words = text.split()
    if kind != _KIND:
        raise ProtrainError(f"expected 'lora r=...', got {cut(text)!r}", key="adapter")
    return _read(words, "adapter", _DTYPE_OF_RECORDS)


def option_of(adapter: str) -> str:
    """The `--lora` of a record's `Workload.adapter`; a text that says no adapter is given back."""
    try:
        lora = read_adapter(adapter)
    except ProtrainError:
        return adapter
    return "" if lora is None else lora.option


def _read(words: list[str], key: str, dtype: AdapterDType) -> Lora:
    """The adapters that words say, with a dtype where none does; errors name the key."""
    found: dict[str, Any] = {"dtype": dtype}
    whole = Document("", None, found, (key,))
    said = set[str]()
    for word in map(str.strip, words):
        name, equals, value = word.partition("=")
        name = _PEFT_KEYS.get(name, name)
        if not equals and name not in (*_FLAGS, *_ALONE):
            raise whole.error(f"expected words such as r=16, got {cut(word)!r}")
        if name in said:
            raise whole.error(f"{cut(name)!r} appears twice", "remove one of them")
        if name in _FLAGS and equals:
            raise whole.error(
                f"expected {name} without a value, got {cut(word)!r}", f"{name} alone"
            )
        said.add(name)
        found[name] = (value or None) if equals else _ALONE.get(name, name in _FLAGS)
        if name in ("targets", "modules_to_save") and equals:
            found[name] = list(dict.fromkeys(value.split("+")))
    lora = whole.read(Lora, strict=False)
    return msgspec.structs.replace(lora, alpha=lora.alpha or 2 * lora.rank)
