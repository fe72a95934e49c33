"""Adapters as texts: small trainable layers that are added to a model whose own are frozen.

A user says `--lora r=16,dropout=0.05`, and a record says
`adapter: lora r=16 dtype=float32 dropout=0.05`. Both are one grammar, read by one parser. They
differ in the dtype that is meant where none is said: the option has PEFT's default, and a record
means the base model's, which was the only one when the first records with adapters were written.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from protrain_runtime.contract.errors import ProtrainError, cut

ALL_LINEAR = "all-linear"
AdapterDType = Literal["float32", "base"]
"""float32: what PEFT makes of adapters of a 16-bit model; base: that of the adapted layer."""
Biases = Literal["none", "all", "lora_only"]
Projection = Literal["batch_average", "batch_average_once", "random"]
"""The vector of VeLoRA in PEFT's words: the mean of each batch, of the first one, or chance."""

_Word = TypeVar("_Word", bound=str)

_KIND = "lora"
_DTYPE_OF_RECORDS: AdapterDType = "base"
_DTYPE_OF_OPTIONS: AdapterDType = "float32"
_MAX_DIGITS = 6  # of ranks
_EXAMPLE = "r=16, or r=16,alpha=32,targets=q_proj+v_proj"
_FLAGS = ("rslora", "dora")
_KEYS = (
    *("r", "alpha", "targets", "dtype", "dropout", *_FLAGS),
    *("velora", "bias", "modules_to_save", "freeze"),
)
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
_MODULE_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
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

    rank: int
    alpha: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dtype: AdapterDType = _DTYPE_OF_OPTIONS
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    velora: Literal["", "batch_average", "batch_average_once", "random"] = ""
    bias: Biases = "none"
    modules_to_save: tuple[str, ...] = ()
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
        values = {
            "alpha": "" if self.alpha == 2 * self.rank else str(self.alpha),
            "targets": "" if self.targets == (ALL_LINEAR,) else "+".join(self.targets),
            "dtype": "" if self.dtype == dtype else self.dtype,
            "dropout": repr(self.dropout) if self.dropout else "",
            "velora": self.velora,
            "bias": "" if self.bias == "none" else self.bias,
            "modules_to_save": "+".join(self.modules_to_save),
            "freeze": self.freeze,
        }
        said = {
            key: key if value == _ALONE.get(key) else f"{key}={value}"
            for key, value in values.items()
            if value
        }
        said |= {"r": f"r={self.rank}"} | {flag: flag for flag in _FLAGS if getattr(self, flag)}
        return [said[key] for key in _KEYS if key in said]


def parse_lora(text: str) -> Lora:
    """Parse `--lora r=16[,alpha=32][,targets=q_proj+v_proj]...`; ProtrainError for another text."""
    return _Reader(text, "--lora").lora(text.split(","), _DTYPE_OF_OPTIONS)


def read_adapter(text: str) -> Lora | None:
    """Parse a record's `Workload.adapter`; None if empty; ProtrainError for another text."""
    if not text:
        return None
    kind, *words = text.split()
    if kind != _KIND:
        raise ProtrainError(f"expected 'lora r=...', got {cut(text)!r}", key="adapter")
    return _Reader(text, "adapter").lora(words, _DTYPE_OF_RECORDS)


def option_of(adapter: str) -> str:
    """The `--lora` of a record's `Workload.adapter`; a text that says no adapter is given back."""
    try:
        lora = read_adapter(adapter)
    except ProtrainError:
        return adapter
    return "" if lora is None else lora.option


class _Reader:
    """Reads the words of an adapter; its errors name where they stand."""

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key = text, key
        self._found: dict[str, str] = {}

    def lora(self, words: list[str], dtype: AdapterDType) -> Lora:
        for word in words:
            self._take(word.strip())
        if "r" not in self._found:
            raise self._unclear()
        rank = self._count("r")
        return Lora(
            rank=rank,
            alpha=self._count("alpha") if "alpha" in self._found else 2 * rank,
            targets=self._names("targets") or (ALL_LINEAR,),
            dtype=self._one_of("dtype", get_args(AdapterDType), dtype),
            dropout=self._probability("dropout"),
            rslora="rslora" in self._found,
            dora="dora" in self._found,
            velora=self._one_of("velora", get_args(Projection), ""),
            bias=self._one_of("bias", get_args(Biases), "none"),
            modules_to_save=self._names("modules_to_save"),
            freeze=self._one_of("freeze", ("A",), ""),
        )

    def _take(self, word: str) -> None:
        """Note one word: KEY=VALUE, or a flag."""
        name, equals, value = word.partition("=")
        key = _PEFT_KEYS.get(name, name)
        if key not in _KEYS and re.fullmatch(r"[A-Za-z_]+", key):
            near = difflib.get_close_matches(key, (*_KEYS, *_PEFT_KEYS), n=1)
            raise self._error(
                f"expected one of {', '.join(_KEYS)}, got {cut(name)!r}",
                f"did you mean {near[0]}?" if near else f"such as {_EXAMPLE}",
            )
        if key in _FLAGS and equals:
            raise self._error(f"expected {name} without a value, got {cut(word)!r}", f"{key} alone")
        value = value if equals else _ALONE.get(key, value)
        if key not in _KEYS or key in self._found or (key not in _FLAGS and not value):
            raise self._unclear()
        self._found[key] = value

    def _count(self, key: str) -> int:
        value = self._found[key]
        if (
            not (value.isascii() and value.isdecimal())
            or len(value) > _MAX_DIGITS
            or not int(value)
        ):
            raise self._error(f"expected {key} to be a whole number above 0, got {cut(value)!r}")
        return int(value)

    def _probability(self, key: str) -> float:
        value = self._found.get(key, "0")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < 1:
            raise self._error(f"expected {key} to be at least 0 and below 1, got {cut(value)!r}")
        return number

    def _names(self, key: str) -> tuple[str, ...]:
        names = self._found[key].split("+") if key in self._found else []
        for name in names:
            if not _MODULE_NAME.fullmatch(name):
                raise self._error(
                    f"expected {key} to be names of modules, got {cut(self._found[key])!r}",
                    f"join them by +, such as {key}=q_proj+v_proj",
                )
        return tuple(dict.fromkeys(names))

    def _one_of(self, key: str, words: tuple[_Word, ...], default: _Word) -> _Word:
        value = self._found.get(key)
        if value is None:
            return default
        for word in words:
            if value == word:
                return word
        near = difflib.get_close_matches(value, words, n=1, cutoff=0.5)
        expected = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
        raise self._error(
            f"expected {key} to be {expected}, got {cut(value)!r}",
            f"did you mean {near[0]}?" if near else None,
        )

    def _unclear(self) -> ProtrainError:
        return self._error(f"expected {_EXAMPLE}, got {cut(self._text)!r}")

    def _error(self, problem: str, fix: str | None = None) -> ProtrainError:
        return ProtrainError(problem, key=self._key, fix=fix)
