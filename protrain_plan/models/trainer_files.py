"""Configuration files of trainers, read as options of `fit` and `plan`. No torch, no network.

A format is a table: a fact, and the key of the file that states it. The formats share one
vocabulary of facts, of which each is read in one way (`_READERS`; a few keys have their own), and
`_OPTIONS` makes the options of facts. What no table names, and what the options cannot say, is one
error: an answer is never for something else.

Read from the projects' own code and examples: Axolotl at 067b021c (schemas, `loaders/model.py`),
LLaMA-Factory at ff6d4d12 (`hparams`, `model/adapter.py`), torchtune at bd2a0fc7 (recipes,
`models/*/_model_builders.py`), transformers 5.23 (`TrainingArguments`), TRL at f2cd5771
(`SFTConfig`, `ModelConfig`, `sft_trainer.py`).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from protrain_plan.models.presets import preset_names, preset_of, read_config
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.adapters import ALL_LINEAR, Lora
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import Node, listed, parsed_json, root

Options = dict[str, Any]
"""Options of `fit` and `plan` by their fields, and `model`."""


class _WrongError(Exception):
    """A value that no option says; the argument is what was expected."""


class _WrongTypeError(_WrongError):
    """A value of another type, which is a slip even where an option answers its key."""


_PLACEHOLDER = re.compile(r"auto|.*(\$\{|\{\{).*", re.S)
"""A text in a value's place, which a trainer or a template fills."""

Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A decision of the plan: its keys, its values for all blocks and for none, its default."""

    keys: tuple[str, ...]
    on: object = True
    off: object = False
    default: object = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A trainer's files: `marks` are keys that no other trainer's files have.

    `keys` has the fact that each key states, and `readers` how, where that is not as the fact is.
    `harmless` has the values of a key that take no memory, `ignored` the keys that take none
    with any value: others are not understood, unless they switch a known feature off.
    `base` says what adapters of 16-bit models have the dtype of: the base, instead of float32;
    `packed_base` says so of packed weights alone. A null of `nulls` is no default, as others are.
    `full` is the precision of a training without adapters, and `sharded` that with ZeRO or FSDP,
    which any of `shards` turns on.
    `follows` is how its trainer follows a plan.
    """

    name: str
    marks: tuple[str, ...]
    keys: Mapping[str, str]
    defaults: Mapping[str, object]
    decided: re.Pattern[str]
    ignored: re.Pattern[str]
    full: str
    checkpointing: Switch = Switch(keys=("gradient_checkpointing",))
    offloading: Switch = Switch(keys=("activation_offloading",))
    readers: Mapping[str, Reader] = field(default_factory=dict)
    harmless: Mapping[str, Collection[object]] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    follows: str = 'use_plan(trainer, "plan.yaml")'
    adapters: str = "pure"
    sharded: str = ""
    shards: tuple[str, ...] = ("deepspeed", "fsdp")
    base: bool = False
    packed_base: bool = False

    def key_of(self, fact: str) -> str | None:
        """The key that says a fact in such files."""
        return next((key for key, stated in self.keys.items() if stated == fact), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A key with its value, and the option that it became; no option where that is the default."""

    key: str
    value: object
    option: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFile:
    """A trainer's file: what it asks for as options, and its keys in lists.

    `by_default` is what the trainer takes where the file is silent. `decided` is what the plan
    decides in its place, `ignored` what takes no memory of a step. `given` were not asked of it.
    A row of its batches has as many sequences as `sequences_per_row` says.
    """

    path: str
    format: Format
    options: Options
    understood: tuple[Stated, ...]
    by_default: tuple[Stated, ...]
    decided: Mapping[str, object]
    ignored: Mapping[str, object]
    given: Collection[str] = ()
    sequences_per_row: int = 1

    @property
    def command(self) -> str:
        """The model and its options as they are typed."""
        options = (words(self.options, option) for option in self.options if option != "model")
        return " ".join((str(self.options["model"]), *options))

    def value_of(self, key: str) -> object:
        """The value that the file, or the trainer by default, has for a key."""
        values = {one.key: one.value for one in (*self.understood, *self.by_default)}
        return values.get(key)


def is_trainer_file(path: str) -> bool:
    """Whether a MODEL argument is such a file: any YAML, and JSON with keys of a trainer."""
    suffix = Path(path).suffix.lower()
    if suffix != ".json" or not Path(path).is_file():
        return suffix in (".yaml", ".yml")
    keys = _nodes(path)
    return "model_type" not in keys and bool(_marked(keys) or _other(keys))


def read_trainer_file(path: str, *, given: Collection[str] = ()) -> TrainerFile:
    """Read a trainer's file; the options that are `given` elsewhere are not asked of it.

    ProtrainError for a file of no known trainer or of several, for keys that are not understood,
    for a value that no option says, and for what an answer needs and neither the file nor its
    trainer's default says.
    """
    nodes = _nodes(path)
    return _Reading(path, _format_of(path, nodes), nodes, given).file()


def _nodes(path: str) -> dict[str, Node]:
    """The values by key; those of mappings besides, by `key.inner`."""
    text = read_text(path)
    if Path(path).suffix.lower() == ".json":
        parsed_json(text, path)
        text = text.replace("\t", " ")  # blanks of JSON, but none of YAML
    found: dict[str, Node] = {}
    waiting = [root(text, path)]
    while waiting:
        for node in waiting.pop().any_mapping().values():
            assert node.key is not None
            found[node.key] = node
            if isinstance(node.node, yaml.MappingNode):
                waiting.append(node)
    return found


def _marked(keys: Collection[str]) -> list[Format]:
    return [one for one in FORMATS if any(mark in keys for mark in one.marks)]


def _other(keys: Collection[str]) -> tuple[str, str] | None:
    """A known kind of files that no answer is made from, and the fix."""
    return next((one for marks, one in _OTHERS if any(mark in keys for mark in marks)), None)


def _format_of(path: str, keys: Collection[str]) -> Format:
    """The format with such keys; TRL, and then the Trainer, only where no other has any."""
    if other := _other(keys):
        raise ProtrainError(f"this is {other[0]}", source=path, fix=other[1])
    marked = _marked(keys)
    found = [one for one in marked if one not in (TRL, TRAINER)] or marked[:1]
    if len(found) == 1:
        return found[0]
    if not found:
        marks = [f"{one.name} ({one.marks[0]})" for one in FORMATS]
        problem = "this is no configuration file of a trainer that is known"
        raise ProtrainError(problem, source=path, fix=f"known are {listed(marks, 'and')}")
    said = [f"{next(m for m in one.marks if m in keys)!r} of {one.name}" for one in found]
    problem = f"the file has keys of several trainers: {listed(said, 'and')}"
    raise ProtrainError(problem, source=path, fix="keep those of one")


class _Reading:
    """One file while its keys become facts, and its facts options."""

    def __init__(
        self, path: str, trainer: Format, nodes: Mapping[str, Node], given: Collection[str]
    ) -> None:
        self.path, self.format, self.given = path, trainer, given
        self.facts: dict[str, Any] = dict(trainer.defaults)
        self.places: dict[str, Node] = {}  # of facts that the file states
        self.lists: dict[str, dict[str, object]] = {
            name: {} for name in ("stated", "decided", "ignored", "unclear")
        }
        for key, node in nodes.items():
            self._take(key, node)
        if unclear := list(self.lists["unclear"]):
            fixes = [fix for pattern, fix in _FIXES if any(map(pattern.match, unclear))]
            if not all(any(pattern.match(key) for pattern, _ in _FIXES) for key in unclear):
                fixes.append(_REMOVE)
            raise ProtrainError(
                "what this takes is not known, and an answer without it would be for another job",
                source=path,
                key=", ".join(unclear),
                fix="; ".join(fixes),
            )
        if self.facts.get("bf16") == "auto" and self.facts.get("fp16"):
            del self.facts["bf16"]  # else it is on: all devices here have it

    def _take(self, key: str, node: Node) -> None:
        """Put one key into a list."""
        trainer = self.format
        if any(key.rpartition(".")[0] in self.lists[name] for name in ("decided", "ignored")):
            return
        value = _plain(node)
        if value is None and key in trainer.nulls:
            self.facts.pop(trainer.keys[key], None)
        harmless = value is None or repr(value) in map(repr, trainer.harmless.get(key, ()))
        if key not in trainer.harmless:
            harmless |= bool(_is_off(value) and _FEATURES.fullmatch(key))
            harmless |= bool(value in (1, -1) and _DEGREES.fullmatch(key))
        if key in trainer.keys and value is not None:
            self._state(key, value, node)
            name = "stated"
        elif key in trainer.harmless and not harmless:
            name = "unclear"
        elif trainer.decided.fullmatch(key):
            name = "decided"
        elif harmless or trainer.ignored.fullmatch(key):
            name = "ignored"
        elif isinstance(value, dict) and value:
            return  # its keys are told one by one
        else:
            name = "unclear"
        self.lists[name][key] = value

    def _state(self, key: str, value: object, node: Node) -> None:
        """Take the fact, or the facts, that a key states."""
        fact = self.format.keys[key]
        try:
            read = self.format.readers.get(key, _READERS.get(fact, _flag))(value)
        except _WrongError as wrong:
            is_slip = isinstance(wrong, _WrongTypeError)
            is_slip &= not (isinstance(value, str) and _PLACEHOLDER.fullmatch(value))
            if _option(fact) in self.given and not is_slip:
                return
            fix = "write such a value there" if is_slip else self._fix(fact)
            raise node.expected(str(wrong), fix) from None
        if read is False and fact in self.places and self.facts[fact]:
            return  # another key has turned it on
        found = read if isinstance(read, dict) else {fact: read}
        self.facts |= found
        self.places |= dict.fromkeys(found, node)

    def file(self) -> TrainerFile:
        options: Options = {}
        for option, make in _OPTIONS.items():
            if option not in self.given and (value := make(self)) not in (None, "", False):
                options[option] = value

        def stated(values: Mapping[str, object]) -> tuple[Stated, ...]:
            keys = self.format.keys
            return tuple(
                Stated(key=key, value=value, option=words(options, _option(keys[key])))
                for key, value in values.items()
            )

        unsaid = {
            key: value
            for fact, value in self.format.defaults.items()
            if fact in self.facts and fact not in self.places and (key := self.format.key_of(fact))
        }
        return TrainerFile(
            path=self.path,
            format=self.format,
            options=options,
            understood=stated(self.lists["stated"]),
            by_default=tuple(one for one in stated(unsaid) if one.option),
            decided=self.lists["decided"],
            ignored=self.lists["ignored"],
            given=self.given,
            sequences_per_row=self.sequences_per_row,
        )

    def _fix(self, fact: str) -> str | None:
        option = _option(fact)
        if fact in _FIX_OF_FACT:
            return _FIX_OF_FACT[fact]
        return f"say it with {flag(option)}" if option in _OPTIONS else None

    def error(self, fact: str, problem: str, fix: str | None = None) -> ProtrainError:
        """An error at the key that states a fact, or that would."""
        fix = fix or self._fix(fact)
        if (node := self.places.get(fact)) is not None:
            return node.error(problem, fix)
        return ProtrainError(problem, source=self.path, key=self.format.key_of(fact), fix=fix)

    def needed(self, fact: str, what: str) -> Any:
        """A fact that an answer cannot do without."""
        if self.facts.get(fact) is None:
            raise self.error(fact, f"the file does not say {what}")
        return self.facts[fact]

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row of a batch: a chosen and a rejected one where rows are pairs."""
        return 2 if self.facts.get("pairs") else 1

    @property
    def has_adapters(self) -> bool:
        return self.facts.get("method") in ("lora", "qlora")

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO or FSDP trains: their masters are of float32."""
        return any(self.lists["decided"].get(key) for key in self.format.shards)


# Options of facts


def _model(file: _Reading, fact: str = "model") -> str:
    name = file.needed(fact, "which model it trains")
    if read_config(name) is None:
        raise file.error(
            fact,
            f"no configuration is known of the model {cut(name)!r}",
            f"name a preset of the same sizes (protrain models) or a config.json with {flag(fact)}",
        )
    return preset_of(name) or str(name)


def _beside(file: _Reading) -> str | None:
    """A frozen second model: a teacher, or the reference of pairs."""
    if file.facts.get("beside"):
        return _model(file, "beside")
    if not file.facts.get("pairs") or file.facts.get("alone"):
        return None
    if file.has_adapters:
        raise file.error(
            "pairs",
            "its reference is the model with its adapters off: one more forward, without weights",
            "--beside none leaves that forward out, --beside MODEL counts a copy of the model",
        )
    if "model" in file.given:
        raise file.error("pairs", "its reference is a copy of the model", "name it: --beside MODEL")
    return _model(file)


def _optimizer(file: _Reading) -> str:
    name: str = file.needed("optimizer", "its optimizer")
    if name != _OF_32_BITS:
        return name
    adapters = file.has_adapters and not (file.format.base or file.facts.get("pure"))
    if not adapters and _precision(file) == "pure" and _dtype(file) != "float32":
        problem = "its states are of float32 beside parameters of 16 bits, as no option has them"
        fix = "say --optimizer adamw (16 bits), or with --precision master (float32, and copies)"
        raise file.error("optimizer", problem, fix)
    return "adamw"


def _dtype(file: _Reading) -> str:
    facts = file.facts
    if facts.get("bf16") and facts.get("fp16"):
        raise file.error("fp16", "bf16 and fp16 are both on", "set one of them to false")
    if facts.get("bf16") or facts.get("pure"):
        return "bfloat16"
    return "float16" if facts.get("fp16") else str(file.needed("dtype", "the dtype"))


def _precision(file: _Reading) -> str:
    facts, trainer = file.facts, file.format
    sharded = trainer.sharded if file.is_sharded and not file.has_adapters else ""
    precision = sharded or (trainer.adapters if file.has_adapters else trainer.full)
    halves = facts.get("bf16") or facts.get("fp16")
    if trainer.key_of("loaded") and not sharded:  # of which masters are made in any case
        loaded = file.needed("loaded", "which dtype its model is loaded in")
        halves = halves and loaded == "float32"
    if facts.get("pure") or not (halves or trainer.base):  # all in one dtype
        precision = "pure"
    return precision


def _lora(file: _Reading) -> str | None:
    facts = file.facts
    if not file.has_adapters:
        return None
    rank = file.needed("rank", "the rank of its adapters")
    targets = facts.get("targets") or ()
    targets += ("gate_proj", "up_proj", "down_proj") if facts.get("mlp") else ()
    targets += ("lm_head",) if facts.get("head") else ()
    if not targets and not facts.get("all_linear"):
        raise file.error("targets", "the file does not say which layers are adapted")
    if facts.get("all_linear") and not {"lm_head", "embed_tokens"}.isdisjoint(targets):
        problem = "--lora adapts all linear layers or named ones, not both"
        raise file.error("targets", problem, "name those to adapt with --lora")
    is_packed = facts.get("bits4") or facts.get("bits8")
    is_base = file.format.base or (file.format.packed_base and is_packed)
    lora = Lora(
        rank=rank,
        alpha=facts.get("alpha") or 2 * rank,
        targets=(ALL_LINEAR,) if facts.get("all_linear") or ALL_LINEAR in targets else targets,
        dtype="base" if is_base or facts.get("pure") else "float32",
        dropout=facts.get("dropout") or 0.0,
        rslora=bool(facts.get("rslora")),
        dora=bool(facts.get("dora")),
        modules_to_save=facts.get("modules_to_save") or (),
    )
    return lora.option


def _quantize(file: _Reading) -> str | None:
    facts = file.facts
    four, eight = (facts.get(bits) or facts.get("bits") == bits for bits in ("bits4", "bits8"))
    if four and eight:
        raise file.error(
            "bits8", "load_in_4bit and load_in_8bit are both on", "set one of them to false"
        )
    if facts.get("method") == "qlora" and not four:
        raise file.error("method", "qlora packs weights of 4 bits", "set load_in_4bit to true")
    if four and not facts.get("nested", True):
        problem = "scales that are not packed themselves take more than --quantize nf4 counts"
        raise file.error("nested", problem, "set it to true, or take nf4 with --quantize nf4")
    return "nf4" if four else "int8" if eight else None


def _num_devices(file: _Reading) -> int | None:
    groups = [file.facts[fact] for fact in ("shards", "replicas") if fact in file.facts]
    return math.prod(groups) if groups else None


_OPTIONS: dict[str, Callable[[_Reading], object]] = {
    "model": _model,
    "seq_len": lambda file: file.needed("seq_len", "how many tokens a sequence has at most"),
    "batch_size": lambda file: (
        file.needed("batch_size", "how many sequences a batch has") * file.sequences_per_row
    ),
    "accumulate": lambda file: file.facts["accumulate"],
    "num_devices": _num_devices,
    "dtype": _dtype,
    "precision": _precision,
    "lora": _lora,
    "quantize": _quantize,
    "optimizer": _optimizer,
    "compile_blocks": lambda file: file.facts.get("compile_blocks"),
    "clip": lambda file: (file.facts.get("clip") or 0) > 0,
    "beside": _beside,
}
_MADE_OF = {
    "lora": "method rank alpha dropout targets all_linear mlp head rslora dora modules_to_save",
    "quantize": "bits bits_by bits4 bits8 nested",
    "dtype": "bf16 fp16",
    "precision": "pure loaded",
    "num_devices": "shards replicas",
    "beside": "alone",
}
"""Facts of the options that several make; others have the name of their option."""


def _option(fact: str) -> str:
    return next((option for option, facts in _MADE_OF.items() if fact in facts.split()), fact)


def flag(option: str) -> str:
    """An option as it is typed: `--seq-len`."""
    return "--" + option.removesuffix("_blocks").replace("_", "-")


def words(options: Options, option: str) -> str:
    """An option with its value, as it is typed; empty where it is not given."""
    value = options.get(option)
    return "" if value is None else flag(option) if value is True else f"{flag(option)} {value}"


# Values


class _Values(yaml.constructor.SafeConstructor):
    """The values as the trainers' own parsers have them; those that JSON has not as texts."""

    def construct_finite(self, node: yaml.ScalarNode) -> float | str:
        number = self.construct_yaml_float(node)
        return number if math.isfinite(number) else str(node.value)


_Values.add_constructor("tag:yaml.org,2002:float", _Values.construct_finite)  # type: ignore[type-var]


def _plain(node: Node) -> Any:
    try:
        return _Values().construct_object(node.node, deep=True)
    except (ValueError, yaml.YAMLError):
        raise node.error("a value that cannot be read") from None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongTypeError("true or false")
    return value


def _count(value: Any) -> int:
    number = _number(value, what := "a whole number above 0")
    if not number.is_integer():
        raise _WrongTypeError(what)
    if number < 1:
        raise _WrongError(what)
    return int(number)


def _number(value: Any, what: str = "a number") -> float:
    """A number, as a text too: `1e-1` is one in YAML 1.1, and trainers make it a number."""
    try:
        return float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongTypeError(what) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongTypeError("a text")
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, in a list or joined by commas; `all` and `all-linear` are all layers."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _WrongTypeError("names of modules")
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise _WrongError("names of modules")
    return (ALL_LINEAR,) if names in (["all"], [ALL_LINEAR]) else tuple(dict.fromkeys(names))


def _one_of(meanings: Mapping[Any, Any]) -> Reader:
    """A reader of certain values alone; a flag is not taken for a number."""

    def read(value: Any) -> Any:
        for word, meaning in meanings.items():
            if repr(word) == repr(value):
                return meaning
        known = [str(word).lower() if isinstance(word, bool) else str(word) for word in meanings]
        alike = type(value) in map(type, meanings)
        raise (_WrongError if alike else _WrongTypeError)(f"one of {', '.join(known)}")

    return read


_OF_32_BITS = "adamw of 32 bits"
"""bitsandbytes' AdamW: states of float32, as PyTorch's has them beside float32 parameters."""
_OPTIMIZERS = {
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), _OF_32_BITS),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion8bit"),
    **{name: name for name in ("sgd", "rmsprop")},
}
"""Names of `TrainingArguments.optim`. Where states of a paged one are is what the plan decides.

Not `adafactor`: that of transformers computes in float32 copies, that of PyTorch does not.
"""
_TORCHTUNE_OPTIMIZERS = {
    **{f"torch.optim.{name}": name.lower() for name in ("AdamW", "Adam", "SGD")},
    **{f"bitsandbytes.optim.{name}8bit": "adamw8bit" for name in ("AdamW", "PagedAdamW")},
    **{f"bitsandbytes.optim.{name}": _OF_32_BITS for name in ("AdamW", "PagedAdamW")},
}
_ATTENTION = (
    *("flash_attention_2", "flash_attention_3", "flash_attention_4", "fa2", "fa3"),
    *("sdpa", "auto", "flex_attention"),
)
"""Kernels that keep no matrix of scores, as the models here have."""


def _is_off(value: Any) -> bool:
    """Whether a value switches a feature off."""
    words = ("", "no", "none", "off", "false", "disabled", "null", "0")
    return not value or (isinstance(value, str) and value.lower() in words)


def _other_optimizer(value: Any) -> dict[str, Any]:
    """A switch of an optimizer with states of its own, which no option has."""
    if not _is_off(value):
        raise _WrongError("false, since no option has this optimizer as it is there")
    return {}


_PAIRS = {"pairs": True}
_RL = {"dpo": _PAIRS, "ipo": _PAIRS, **dict.fromkeys(("orpo", "simpo"), _PAIRS | {"alone": True})}
"""Losses over pairs of sequences; those that are `alone` need no reference."""


def _rl(value: Any) -> dict[str, Any]:
    read: dict[str, Any] = {} if _is_off(value) else _one_of(_RL)(value)
    return read


def _dtype_of(value: Any) -> dict[str, Any]:
    """A dtype that a model is loaded in."""
    name = str(value).removeprefix("torch.")
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    loaded = _one_of({long: long for long in names.values()} | names)(name)
    halves = {half: True for half in ("bf16", "fp16") if names[half] == loaded}
    return {"loaded": loaded, **(halves or {"dtype": loaded})}


def _component(value: Any) -> dict[str, Any]:
    """`torchtune.models.llama3_1.qlora_llama3_1_8b`: the model, adapters, packed weights."""
    _, _, builder = _text(value).rpartition(".")
    model = re.sub(r"^q?lora_", "", builder)
    method = builder.removesuffix(model).removesuffix("_")
    facts = {"model": _built(model) or model, "method": method}
    return facts | ({"bits4": True} if method == "qlora" else {})


def _second_component(value: Any) -> dict[str, Any]:
    """The frozen model of a builder."""
    return {"beside": _component(value)["model"]}


def _attention_modules(value: Any) -> tuple[str, ...]:
    return tuple(name.replace("output_proj", "o_proj") for name in _names(value))


_READERS: dict[str, Reader] = {
    **dict.fromkeys(("model", "beside"), _text),
    **dict.fromkeys(("seq_len", "batch_size", "accumulate", "shards", "replicas"), _count),
    **dict.fromkeys(("rank", "alpha"), _count),
    **dict.fromkeys(("dropout", "clip"), _number),
    **dict.fromkeys(("targets", "modules_to_save"), _names),
    "optimizer": _one_of(_OPTIMIZERS),
    "loaded": _dtype_of,
}
"""Readers by fact; facts that have none are flags."""

# Formats


def _keys(*facts: str) -> dict[str, str]:
    """The facts by their keys; a line is of one matter: `fact=key fact=key`."""
    pairs = (pair.partition("=") for pair in " ".join(facts).split())
    return {key: fact for fact, _, key in pairs}


_REMOVE = "remove from a copy of the file what no memory and no time depends on"
_FIX_OF_FACT = {
    "method": "train all in a copy of the file, which takes no less (finetuning_type: full, or no"
    " adapter), or name a factory that freezes the rest (path/to/file.py:factory)",
    "pairs": "this method is not planned: no answer counts its samples, its further forwards and a"
    " reward model. The nearest is its supervised part alone, from a copy of the file (stage: sft;"
    " Axolotl: without rl), where --beside MODEL counts the forward of a frozen reference",
}
_FIXES = tuple(
    (re.compile(pattern), fix)
    for pattern, fix in (
        (
            r"plugins|\w*liger|cut_cross|\w*unsloth|lora_\w+_kernel|\w*fused",
            "a kernel that fuses a loss or a layer keeps less: the answer without its key is for"
            " plain kernels",
        ),
        (
            r"\w*(teacher|ref_model|reward)|kd_",
            "--beside MODEL counts a frozen second model; its keys can go then",
        ),
        (
            r"\w*(num_generations|completion|generat|rollout|grpo|vllm)|trl\.|ppo_",
            "sequences that are generated in training are no part of an answer: without these keys"
            " it is for the supervised part alone",
        ),
        (
            r"beta$|kl_coef|\w*kto",
            "this loss is not planned: without its keys the answer is for supervised training, and"
            " --beside MODEL counts the forward of a frozen reference",
        ),
        (
            r"qat|quantizer|fp8|\w*(freeze|frozen|trainable)",
            "name a factory that changes the model so (path/to/file.py:factory): without these keys"
            " the answer is for a model that is not changed",
        ),
    )
)
"""Advice on keys that are not understood, besides removing them."""
_FEATURES = re.compile(
    r"plugins|rl|(fp8|float8|qat|quantization|peft)((_|\.).*)?|compile|torch_?compile(_\w+)?"
    r"|(use_|enable_)?(liger|unsloth|galore|apollo|badam|muon|adam_mini|kt|eaft|dft|asft|v1_kernels"
    r"|kernels|sonicmoe|scattermoe|onebitllms|vllm|cpu|mcore|ipex|cuda_graph|dora|rslora)(_\w+)?"
    r"|use_(\w+_loss|legacy_\w+|mps_device)|cut_cross_entropy|chunked_\w+|tiled_mlp\w*|fused_\w+"
    r"|lora_(mlp|qkv|o|embedding)_kernel|flash_\w+|\w+_attention|shift_attn|padding_free"
    r"|neftune_noise_alpha|noisy_embedding_alpha|relora(_\w+)?|lisa_\w+|loraplus_\w+|pissa_\w+"
    r"|lora_(model_dir|weights|bias|fan_in_fan_out|target_parameters|layers_\w+)|create_new_adapter"
    r"|adapter_name_or_path|gptq(_\w+)?|unfrozen_parameters|mixture_of_depths|full_finetune"
    r"|(process_)?reward_model(_\w+)?|center_rewards_coefficient|ref_model(_\w+)?|sync_ref_model"
    r"|precompute_ref_log_probs|freeze_\w+|train_mm_proj_only|resize_\w+|rope_scaling|upcast_\w+"
    r"|moe_aux_loss_coef|sequence_parallel|\w+_parallel_(size|degree)|auto_find_batch_size|kd_trainer"
    r"|curriculum_sampling|diffusion|pretrain_multipack_attn|multipack_\w+|sample_packing_\w+"
    r"|assistant_only_loss|reinit_weights|device_map|low_cpu_ram|load_in_16bit|xla_\w+|tpu_\w+"
    r"|jit_mode_eval|mp_parameters|half_precision_backend|split_batches|torchdistx_path|sharded_ddp"
)
"""Keys of trainers that take no memory while they are off."""
_DEGREES = re.compile(
    r"(\w*(tensor|context|sequence|pipeline|expert|data)\w*parallel|cp|tp|ep|pp|sp)"
    r"_?(model_parallel_)?(size|degree|dim)|data_parallel_(shard|replicate)_dim|dp_shards?"
)
"""Keys that divide a model among devices, which those of one device do not."""
_LOGS = (
    r"(wandb|swanlab|comet|mlflow|trackio|hub|logging|log|eval|evals|save|saves|warmup|dataloader"
    r"|lr|ray|ddp|dataset|datasets|preprocessing|metric|push_to_hub|load_best|greater|prediction"
    r"|profiler|scheduler|cosine|tensorboard|clearml|aim|neptune|dvclive|otel|early_stopping)"
    r"(_.*|\..*)?"
)
"""Keys of logs, checkpoints, data and schedules: nothing of it is in a step's memory."""
_STEPS = (
    r"learning_rate|weight_decay|adam_\w+|num_(train_)?epochs|epochs|max_steps|seed|data_seed"
    r"|output_dir|overwrite_\w+|resume_from_checkpoint|auto_resume_\w+|report_to|run_name|tf32"
    r"|remove_unused_columns|group_by_length|do_(train|eval|predict)|disable_tqdm"
    r"|per_device_eval_batch_size|trust_remote_code|train_sampling_strategy|debug|local_rank"
    r"|evaluation_strategy|per_gpu_\w+|num_workers|num_proc|use_(wandb|swanlab|tensorboard|mlflow)"
    r"|hf_\w+|\w*revision\w*|use_auth_token|auth_token|name|project|description|version|tags"
    r"|include_\w+|log_\w+|ignore_data_skip|full_determinism|skip_memory_metrics|past_index"
    r"|min_lr\w*|eta_min|decay_\w+|betas|beta[12]|epsilon|cache_dir|low_cpu_mem_usage"
    r"|dpo_(beta|label_smoothing|norm_loss|use_weighting)|(simpo|rl|pref|cpo|orpo)_(alpha|beta|gamma)"
    r"|simpo_gamma|pref_ftx|loraplus_lr_\w+"
)
_OF_A_PLAN = (
    r"gradient_checkpointing(_.*|\..*)?|activation_offloading(\..*)?|deepspeed(\..*)?"
    r"|fsdp(_.*|\..*)?|activation_checkpointing\w*|offload_\w+"
)


def _pattern(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts))


_SWITCHES = {
    f"use_{name}": _other_optimizer for name in ("muon", "galore", "apollo", "badam", "adam_mini")
}
"""Optimizers that a key turns on."""
_SWITCHED = [f"optimizer={key}" for key in _SWITCHES]
_TRAINING_ARGUMENTS = (
    "model=model_name_or_path batch_size=per_device_train_batch_size"
    " accumulate=gradient_accumulation_steps bf16=bf16 fp16=fp16 optimizer=optim clip=max_grad_norm"
)
_OF_ADAPTERS = (
    "alpha=lora_alpha dropout=lora_dropout rslora=use_rslora dora=use_dora packing=packing"
)
"""Keys that LLaMA-Factory and TRL have beside `TrainingArguments`."""
_OF_TRAINERS: dict[str, Any] = {"batch_size": 8, "accumulate": 1, "optimizer": "adamw", "clip": 1.0}
_NO_SMOOTHING = {"label_smoothing_factor": (0.0, 0)}

AXOLOTL = Format(
    name="Axolotl",
    marks=("base_model", "micro_batch_size", "sequence_len"),
    keys=_keys(
        "model=base_model seq_len=sequence_len batch_size=micro_batch_size",
        "accumulate=gradient_accumulation_steps shards=dp_shard_size replicas=dp_replicate_size",
        "bf16=bf16 bf16=bfloat16 fp16=fp16 fp16=float16 optimizer=optimizer clip=max_grad_norm",
        "method=adapter rank=lora_r alpha=lora_alpha dropout=lora_dropout rslora=peft_use_rslora",
        "dora=peft_use_dora targets=lora_target_modules all_linear=lora_target_linear",
        "modules_to_save=lora_modules_to_save bits4=load_in_4bit bits8=load_in_8bit",
        "packing=sample_packing packing=pad_to_sequence_len pairs=rl",
        *_SWITCHED,
    ),
    readers={
        **_SWITCHES,
        "rl": _rl,
        "bf16": _one_of({True: True, False: False, "auto": "auto", "full": True}),
        "adapter": _one_of({"lora": "lora", "qlora": "qlora"}),
    },
    harmless={
        "attn_implementation": _ATTENTION,
        **dict.fromkeys(("flash_attention", "sdp_attention", "flex_attention"), (True, False)),
    },
    defaults=_OF_TRAINERS | {"seq_len": 512, "batch_size": 1, "bf16": "auto", "dtype": "float32"},
    nulls=("bf16",),
    shards=("deepspeed", "fsdp", "fsdp_config"),
    decided=_pattern(_OF_A_PLAN),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"datasets|test_datasets|val_set_size|chat_template\w*|special_tokens(\..*)?|tokens(\..*)?"
        r"|tokenizer_\w+|train_on_inputs|shuffle_\w+|strict|loss_watchdog_\w+|eot_tokens"
        r"|skip_prepare_dataset|model_type|processor_type|base_model_ignore_patterns|is_\w+_model"
        r"|pretraining_dataset|streaming(_\w+)?|excess_length_strategy|roles_to_train|reset_\w+"
        r"|default_system_message|jagged_\w+|do_causal_lm_eval|accelerator_config(\..*)?",
    ),
    full="pure",
    sharded="master",
)

LLAMA_FACTORY = Format(
    name="LLaMA-Factory",
    marks=("finetuning_type", "cutoff_len", "template"),
    keys=_keys(
        _TRAINING_ARGUMENTS,
        _OF_ADAPTERS,
        "seq_len=cutoff_len pure=pure_bf16 packing=neat_packing",
        "method=finetuning_type rank=lora_rank targets=lora_target",
        "modules_to_save=additional_target bits=quantization_bit bits_by=quantization_method",
        "nested=double_quantization pairs=stage alone=pref_loss beside=ref_model",
        *_SWITCHED,
    ),
    readers={
        **_SWITCHES,
        "stage": _one_of({"sft": {}, "pt": {}, "dpo": _PAIRS}),
        "pref_loss": _one_of(
            dict.fromkeys(("sigmoid", "hinge", "ipo"), False)
            | dict.fromkeys(("orpo", "simpo"), True)
        ),
        "finetuning_type": _one_of({"full": "", "lora": "lora"}),
        "quantization_bit": _one_of({4: "bits4", 8: "bits8"}),
        "quantization_method": _one_of({"bnb": "bnb", "bitsandbytes": "bnb"}),
    },
    harmless={"flash_attn": _ATTENTION, **_NO_SMOOTHING},
    defaults=_OF_TRAINERS
    | {"seq_len": 2048, "method": "lora", "rank": 8, "targets": (ALL_LINEAR,)},
    decided=_pattern(_OF_A_PLAN, r"disable_gradient_checkpointing|use_reentrant_gc"),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"template|max_samples|plot_loss|val_size|tokenized_path|cache_dir|media_dir|mask_history"
        r"|image_\w+_pixels|video_\w+|interleave_probs|mix_strategy|buffer_size|streaming|tool_format"
        r"|default_system|enable_thinking|train_on_prompt|ignore_pad_token_for_loss|infer_\w+"
        r"|split_special_tokens|use_fast_tokenizer|(ms|om)_hub_token|compute_accuracy"
        r"|(galore|apollo|badam)_\w+|freeze_(trainable|extra)_\w+|do_sample|temperature|top_[kp]|max_new_tokens",
    ),
    checkpointing=Switch(keys=("disable_gradient_checkpointing",), on=False, off=True),
    full="autocast",
    sharded="master",
)

TORCHTUNE = Format(
    name="torchtune",
    marks=("model._component_",),
    keys=_keys(
        "model=model._component_ seq_len=tokenizer.max_seq_len batch_size=batch_size dtype=dtype",
        "accumulate=gradient_accumulation_steps optimizer=optimizer._component_",
        "clip=clip_grad_norm compile_blocks=compile packing=dataset.packed",
        "rank=model.lora_rank alpha=model.lora_alpha dropout=model.lora_dropout",
        "targets=model.lora_attn_modules mlp=model.apply_lora_to_mlp dora=model.use_dora",
        "head=model.apply_lora_to_output bits4=model.quantize_base",
        "beside=teacher_model._component_",
    ),
    readers={
        "teacher_model._component_": _second_component,
        "model._component_": _component,
        "dtype": _one_of({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}),
        "model.lora_attn_modules": _attention_modules,
        "optimizer._component_": _one_of(_TORCHTUNE_OPTIMIZERS),
    },
    harmless={
        "loss._component_": (
            "torchtune.modules.loss.LinearCrossEntropyLoss",
            "torchtune.modules.loss.CEWithChunkedOutputLoss",
            "torch.nn.CrossEntropyLoss",
        ),
        "device": ("cuda",),
    },
    defaults={"accumulate": 1, "rank": 8, "alpha": 16},
    decided=_pattern(
        r"enable_activation_\w+|optimizer_in_bwd|fsdp(_.*|\..*)?|custom_sharded_layers"
        r"|memory_efficient_fsdp_wrap|loss\._component_"
    ),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"(checkpointer|metric_logger|profiler|lr_scheduler|dataset_val|dataset)\..*|shuffle"
        r"|tokenizer\.\w+|optimizer\.(lr|fused|weight_decay|betas|eps)|max_steps_per_epoch"
        r"|save_\w+|run_val_every_n_steps|batch_size_val|log_\w+|base_model_path|collate_fn"
        r"|teacher_checkpointer(\..*)?|kd_ratio|kd_loss\._component_|low_cpu_ram|cudnn_\w+",
    ),
    checkpointing=Switch(keys=("enable_activation_checkpointing",)),
    offloading=Switch(keys=("enable_activation_offloading",)),
    full="pure",
    follows="protrain_runtime.prepare in its recipe",
    base=True,
)

TRAINER = Format(
    name="the Trainer",
    marks=("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
    keys=_keys(
        _TRAINING_ARGUMENTS, "seq_len=max_seq_length loaded=dtype loaded=torch_dtype", *_SWITCHED
    ),
    readers=_SWITCHES,
    harmless={
        "attn_implementation": _ATTENTION,
        **_NO_SMOOTHING,
    },
    # Its script loads the model: float32 is the most that may be.
    defaults=_OF_TRAINERS | {"loaded": "float32", "dtype": "float32"},
    decided=_pattern(_OF_A_PLAN),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"accelerator_config(\..*)?|average_tokens_\w+|batch_eval_metrics|bf16_full_eval"
        r"|fp16_full_eval|do_\w+|enable_jit_checkpoint|full_determinism|ignore_data_skip"
        r"|include_\w+|label_names|length_column_name|log_\w+|metric_for_best_model|past_index"
        r"|project|restore_callback_\w+|skip_memory_metrics|torch_empty_cache_steps|use_cache"
        r"|optim_args|optim_target_modules|liger_kernel_config|jit_mode_eval",
    ),
    checkpointing=Switch(keys=("gradient_checkpointing", "activation_checkpointing")),
    full="autocast",
    sharded="master",
)

TRL = replace(
    TRAINER,
    name="TRL",
    marks=("use_peft", "max_length", "packing", "dataset_text_field"),
    keys=_keys("seq_len=max_length")
    | dict(TRAINER.keys)
    | _keys(
        _OF_ADAPTERS,
        "method=use_peft rank=lora_r targets=lora_target_modules",
        "modules_to_save=lora_modules_to_save bits4=load_in_4bit bits8=load_in_8bit",
        "nested=use_bnb_nested_quant bits_by=bnb_4bit_quant_type",
        "beside=teacher_model_name_or_path",
    ),
    readers={
        **_SWITCHES,
        "use_peft": _one_of({True: "lora", False: ""}),
        "bnb_4bit_quant_type": _one_of({"nf4": "nf4"}),
    },
    defaults=dict(TRAINER.defaults)
    | {"seq_len": 1024, "bf16": "auto"}
    | {"rank": 16, "alpha": 32, "dropout": 0.05, "nested": False},
    nulls=("max_length",),
    ignored=_pattern(
        TRAINER.ignored.pattern,
        r"chat_template_path|(pad|eos|bos)_token|shuffle_dataset|completion_only_loss"
        r"|packing_strategy|lora_task_type",
    ),
    harmless={**TRAINER.harmless, "loss_type": ("nll",)},
    checkpointing=Switch(keys=TRAINER.checkpointing.keys, default=True),
    adapters="autocast",
    packed_base=True,
)

FORMATS = (AXOLOTL, LLAMA_FACTORY, TORCHTUNE, TRL, TRAINER)

_OTHERS: tuple[tuple[tuple[str, ...], tuple[str, str]], ...] = (
    (
        ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"),
        (
            "a configuration of DeepSpeed, which names no model; a plan decides in its place",
            "name the file of the trainer that takes it, or a model with its options:"
            " protrain fit llama-3.1-8b --on MACHINE",
        ),
    ),
    (
        ("compute_environment", "distributed_type"),
        (
            "a configuration of accelerate, which names no model",
            "name the file of the trainer, or a model with its options, and --num-devices for"
            " num_processes: protrain fit llama-3.1-8b --on MACHINE --num-devices 2",
        ),
    ),
    (
        ("model_class", "dist_config", "kernel_config", "quant_config", "peft_config"),
        (
            "a file of LLaMA-Factory's v1, which is not read",
            "say it with options: its model, cutoff_len as --seq-len, micro_batch_size as"
            " --batch-size, peft_config as --lora, quant_config as --quantize",
        ),
    ),
)
"""Files that are known by their marks and not read: what they are, and what to give instead."""

_OTHER_BUILDERS = {
    "llama3_8b": "llama-3.1-8b",
    "llama3_70b": "llama-3.1-70b",
    "llama3_3_70b": "llama-3.1-70b",
    "phi4_14b": "phi-4",
    **{f"qwen2_{size}": f"qwen2.5-{size.replace('_', '.')}" for size in ("0_5b", "1_5b", "7b")},
}
"""Builders of torchtune that call the preset of their sizes otherwise."""


def _built(builder: str) -> str | None:
    """The preset with the sizes (vocabulary, layers, heads, widths) of a builder of torchtune.

    They were compared for all builders of that version that are named as presets are.
    """

    def letters(name: str) -> str:
        return re.sub(r"[-_.]", "", name)

    plain = letters(re.sub(r"_(base|instruct)$", "", builder))
    named = (name for name in preset_names() if letters(name) == plain)
    return _OTHER_BUILDERS.get(builder) or next(named, None)
