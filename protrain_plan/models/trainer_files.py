"""Configuration files of trainers, read as options of `fit` and `plan`. No torch, no network.

`trainers.yaml` has a table for each trainer: a key of its files states a fact, which is read in one
way, and `_OPTIONS` makes the options of facts. What no table names, and what the options cannot
say, is one error: an answer is never for something else.
"""

import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from protrain_plan.models.presets import preset_names, preset_of, read_config
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.adapters import ALL_LINEAR, Lora
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import Node, listed, parsed_json, root

_TABLES: dict[str, Any] = yaml.safe_load(read_text(Path(__file__).with_name("trainers.yaml")))
_FACTS = {fact: (*row.split(maxsplit=2), "") for fact, row in _TABLES["facts"].items()}


class _WrongError(Exception):
    """A value that no option says; the argument is what was expected."""


class _SlipError(_WrongError):
    """A value of another type, which is wrong even where an option answers its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A decision of the plan: its keys, its values for all blocks and for none, its default."""

    keys: Collection[str]
    on: object = True
    off: object = False
    default: object = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A trainer's files, as `trainers.yaml` describes them."""

    name: str
    marks: Collection[str]
    decided: re.Pattern[str]
    ignored: re.Pattern[str]
    checkpointing: Switch
    offloading: Switch
    keys: Mapping[str, Any]
    defaults: Mapping[str, object]
    harmless: Mapping[str, Collection[object]]
    nulls: Collection[str] = ()
    rank: int = 3
    refused: Collection[str] = ()
    follows: str = 'use_plan(trainer, "plan.yaml")'
    shards: Collection[str] = ("deepspeed", "fsdp")
    full: str = "pure"
    sharded: str = ""
    alone: str = ""
    adapters: str = "pure"
    base: bool = False
    packed_base: bool = False

    def key_of(self, fact: str) -> str | None:
        """The key that says a fact in such files."""
        return next((key for key in self.keys if self.stated(key)[0] == fact), None)

    def stated(self, key: str) -> tuple[str, Any]:
        """The fact that a key states, and how it is read."""
        row = self.keys[key]
        return (row, _FACTS[row][0]) if isinstance(row, str) else (row[0], row[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A key with its value, and the option that it became; no option where that is the default."""

    key: str
    value: object
    option: str


class TrainerFile:
    """A trainer's file: what it asks for as `options`, and its keys in lists.

    `understood` are those that became options, and `by_default` what the trainer takes where the
    file is silent. `decided` is what the plan decides in its place, `ignored` what takes no memory
    of a step. Options that are `given` are not asked of the file.
    """

    def __init__(self, path: str, given: Collection[str] = (), model: str | None = None) -> None:
        nodes = _nodes(path)
        self.path, self.format, self.given = path, _format_of(path, nodes), given
        self.facts: dict[str, Any] = dict(self.format.defaults)
        self._places: dict[str, Node] = {}  # of facts that the file states
        self.decided: dict[str, object] = {}
        self.ignored: dict[str, object] = {}
        stated: dict[str, object] = {}
        unclear: dict[str, object] = {}
        for key, node in nodes.items():
            if key.rpartition(".")[0] not in self.decided | self.ignored:
                self._take(key, node, stated, unclear)
        if unclear:
            raise _not_understood(path, list(unclear))
        if self.facts.get("bf16") == "auto" and self.facts.get("fp16"):
            del self.facts["bf16"]  # else it is on: all devices here have it
        made = ((name, make(self)) for name, make in _OPTIONS.items() if name not in given)
        options = {name: value for name, value in made if value not in (None, "", False)}
        self.options: dict[str, Any] = ({"model": model} if model else {}) | options
        self.understood = tuple(self._stated(key, value) for key, value in stated.items())
        silent = {self.format.key_of(fact): fact for fact in self.facts.keys() - self._places}
        self.by_default = tuple(
            one
            for key in self.format.keys
            if key in silent and (one := self._stated(key, self.format.defaults[silent[key]])).option
        )

    def _take(
        self, key: str, node: Node, stated: dict[str, object], unclear: dict[str, object]
    ) -> None:
        """Put a key into its list; its inner keys come one by one unless it is in one itself."""
        table, value = self.format, _plain(node)
        harmless = value is None or repr(value) in map(repr, table.harmless.get(key, ()))
        if value is None and key in table.nulls:  # no default, as others are
            self.facts.pop(table.stated(key)[0], None)
        off = (_is_off(value) and _FEATURES.fullmatch(key)) or (
            value in (1, -1) and _DEGREES.fullmatch(key)
        )
        if key in table.keys and value is not None:
            self._state(key, value, node)
            stated[key] = value
        elif key in table.harmless and not harmless:
            unclear[key] = value
        elif table.decided.fullmatch(key):
            self.decided[key] = value
        elif harmless or off or table.ignored.fullmatch(key):
            self.ignored[key] = value
        elif not (isinstance(value, dict) and value):
            unclear[key] = value

    def _state(self, key: str, value: object, node: Node) -> None:
        """Take the fact, or the facts, that a key states."""
        fact, how = self.format.stated(key)
        try:
            known = how if isinstance(how, dict) else _TABLES["values"].get(how)
            read = _READERS[how](value) if known is None else _one_of(known, value)
        except _WrongError as wrong:
            is_slip = isinstance(wrong, _SlipError)
            is_slip &= not (isinstance(value, str) and _PLACEHOLDER.fullmatch(value))
            if _FACTS[fact][1] in self.given and not is_slip:
                return
            fix = "write such a value there" if is_slip else _fix(fact)
            raise node.expected(str(wrong), fix) from None
        if read is False and fact in self._places and self.facts[fact]:
            return  # another key has turned it on
        found = read if isinstance(read, dict) else {fact: read}
        self.facts |= found
        self._places |= dict.fromkeys(found, node)

    def _stated(self, key: str, value: object) -> Stated:
        option = _FACTS[self.format.stated(key)[0]][1]
        return Stated(key=key, value=value, option=words(self.options, option))

    @property
    def command(self) -> str:
        """The model and its options as they are typed."""
        options = (words(self.options, option) for option in self.options if option != "model")
        return " ".join((str(self.options["model"]), *options))

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row of a batch: a chosen and a rejected one where rows are pairs."""
        return 2 if self.facts.get("pairs") else 1

    @property
    def has_adapters(self) -> bool:
        return self.facts.get("method") in ("lora", "qlora")

    @property
    def shards(self) -> list[str]:
        """The keys that turn on ZeRO or FSDP, whose masters are of float32."""
        known = self.decided if "sharded" not in self.facts else dict.fromkeys(self.format.shards, 1)
        return [key for key in self.format.shards if known.get(key)]

    def value_of(self, key: str) -> object:
        """The value that the file, or the trainer by default, has for a key."""
        values = {one.key: one.value for one in (*self.understood, *self.by_default)}
        return values.get(key)

    def error(self, fact: str, problem: str, fix: str | None = None) -> ProtrainError:
        """An error at the key that states a fact, or that would."""
        fix = fix or _fix(fact)
        if (node := self._places.get(fact)) is not None:
            return node.error(problem, fix)
        return ProtrainError(problem, source=self.path, key=self.format.key_of(fact), fix=fix)

    def needed(self, fact: str) -> Any:
        """A fact that an answer cannot do without."""
        if self.facts.get(fact) is None:
            raise self.error(fact, f"the file does not say {_FACTS[fact][2]}")
        return self.facts[fact]


def read_trainer_file(
    path: str, *, given: Collection[str] = (), model: str | None = None
) -> TrainerFile:
    """Read a trainer's file; options that are `given` elsewhere, as a `model`, are not asked of it.

    ProtrainError for a file of no known trainer or of several, for keys that are not understood,
    for a value that no option says, and for what an answer needs and neither the file nor its
    trainer's default says.
    """
    return TrainerFile(path, given, model)


def is_trainer_file(path: str) -> bool:
    """Whether a MODEL argument is such a file: any YAML, and JSON with keys of a trainer."""
    suffix = Path(path).suffix.lower()
    if suffix != ".json" or not Path(path).is_file():
        return suffix in (".yaml", ".yml")
    keys = _nodes(path)
    return "model_type" not in keys and bool(_marked(keys))


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
            found[str(node.key)] = node
            if isinstance(node.node, yaml.MappingNode):
                waiting.append(node)
    return found


def _marked(keys: Collection[str]) -> list[Format]:
    """The formats with such keys that no other one comes before."""
    marked = [one for one in _FORMATS if any(mark in keys for mark in one.marks)]
    return [one for one in marked if one.rank == min(other.rank for other in marked)]


def _format_of(path: str, keys: Collection[str]) -> Format:
    found = _marked(keys)
    if len(found) == 1 and not found[0].refused:
        return found[0]
    if not found:
        problem = "this is no configuration file of a trainer that is known"
        known = [f"{one.name} ({next(iter(one.marks))})" for one in FORMATS]
        fix = f"known are {listed(known, 'and')}"
    elif found[0].refused:
        problem, fix = found[0].refused
    else:
        said = [f"{next(m for m in one.marks if m in keys)!r} of {one.name}" for one in found]
        problem = f"the file has keys of several trainers: {listed(said, 'and')}"
        fix = "keep those of one"
    raise ProtrainError(problem, source=path, fix=fix)


def _not_understood(path: str, keys: list[str]) -> ProtrainError:
    problem = "what this takes is not known, and an answer without it would be for another job"
    by_key = {
        key: [fix for pattern, fix in _TABLES["advice"].items() if re.match(pattern, key)]
        for key in keys
    }
    fixes = [fix for fix in _TABLES["advice"].values() if any(fix in by for by in by_key.values())]
    if not all(by_key.values()):
        fixes.append("remove from a copy of the file what no memory and no time depends on")
    return ProtrainError(problem, source=path, key=", ".join(keys), fix="; ".join(fixes))


def _fix(fact: str) -> str | None:
    """The fix of a value that no option says."""
    option = _FACTS[fact][1]
    said = f"say it with {flag(option)}" if option in _OPTIONS else None
    return _TABLES["fixes"].get(fact, said)


# Options of facts


def _model(file: TrainerFile, fact: str = "model") -> str:
    name = file.needed(fact)
    if read_config(name) is None:
        problem = f"no configuration is known of the model {cut(name)!r}"
        fix = "name a preset of the same sizes (protrain models) or a config.json with"
        raise file.error(fact, problem, f"{fix} {flag(fact)}")
    return preset_of(name) or str(name)


def _beside(file: TrainerFile) -> str | None:
    """A frozen second model: a teacher, or the reference of pairs."""
    if file.facts.get("beside"):
        return _model(file, "beside")
    if not file.facts.get("pairs") or file.facts.get("alone"):
        return None
    if file.has_adapters:
        problem = "its reference is the model with its adapters off: one more forward, without"
        fix = "--beside none leaves that forward out, --beside MODEL counts a copy of the model"
        raise file.error("pairs", f"{problem} weights", fix)
    if "model" in file.given:
        raise file.error("pairs", "its reference is a copy of the model", "name it: --beside MODEL")
    return _model(file)


def _optimizer(file: TrainerFile) -> str:
    name: str = file.needed("optimizer")
    if name != _TABLES["values"]["optimizers"]["paged_adamw"]:
        return name
    adapters = file.has_adapters and not (file.format.base or file.facts.get("pure"))
    if not adapters and _precision(file) == "pure" and _dtype(file) != "float32":
        problem = "its states are of float32 beside parameters of 16 bits, as no option has them"
        fix = "say --optimizer adamw (16 bits), or with --precision master (float32, and copies)"
        raise file.error("optimizer", problem, fix)
    return "adamw"


def _dtype(file: TrainerFile) -> str:
    facts = file.facts
    if facts.get("bf16") and facts.get("fp16"):
        raise file.error("fp16", "bf16 and fp16 are both on", "set one of them to false")
    if file.format.alone and not (file.has_adapters or file.shards):
        return file.format.alone
    if facts.get("bf16") or facts.get("pure"):
        return "bfloat16"
    return "float16" if facts.get("fp16") else str(file.needed("dtype"))


def _precision(file: TrainerFile) -> str:
    facts, table = file.facts, file.format
    sharded = table.sharded if file.shards and not file.has_adapters else ""
    halves = facts.get("bf16") or facts.get("fp16")
    if table.key_of("loaded") and not sharded:  # of which masters are made in any case
        halves = halves and file.needed("loaded") == "float32"
    if facts.get("pure") or not (halves or table.base):  # all in one dtype
        return "pure"
    return sharded or (table.adapters if file.has_adapters else table.full)


def _lora(file: TrainerFile) -> str | None:
    facts, table = file.facts, file.format
    if not file.has_adapters:
        return None
    targets = tuple(facts.get("targets") or ())
    targets += ("gate_proj", "up_proj", "down_proj") if facts.get("mlp") else ()
    targets += ("lm_head",) if facts.get("head") else ()
    if not targets and not facts.get("all_linear"):
        raise file.error("targets", "the file does not say which layers are adapted")
    if facts.get("all_linear") and not {"lm_head", "embed_tokens"}.isdisjoint(targets):
        problem = "--lora adapts all linear layers or named ones, not both"
        raise file.error("targets", problem, "name those to adapt with --lora")
    is_packed = facts.get("bits4") or facts.get("bits8")
    is_base = table.base or (table.packed_base and is_packed) or facts.get("pure")
    return Lora(
        rank=file.needed("rank"),
        alpha=facts.get("alpha") or 2 * facts["rank"],
        targets=(ALL_LINEAR,) if facts.get("all_linear") or ALL_LINEAR in targets else targets,
        dtype="base" if is_base else "float32",
        dropout=facts.get("dropout") or 0.0,
        rslora=bool(facts.get("rslora")),
        dora=bool(facts.get("dora")),
        modules_to_save=facts.get("modules_to_save") or (),
    ).option


def _quantize(file: TrainerFile) -> str | None:
    facts = file.facts
    four, eight = facts.get("bits4"), facts.get("bits8")
    if four and eight:
        problem = "load_in_4bit and load_in_8bit are both on"
        raise file.error("bits8", problem, "set one of them to false")
    if facts.get("method") == "qlora" and not four:
        raise file.error("method", "qlora packs weights of 4 bits", "set load_in_4bit to true")
    if four and not facts.get("nested", True):
        problem = "scales that are not packed themselves take more than --quantize nf4 counts"
        raise file.error("nested", problem, "set it to true, or take nf4 with --quantize nf4")
    return "nf4" if four else "int8" if eight else None


def _num_devices(file: TrainerFile) -> int | None:
    groups = [file.facts[fact] for fact in ("shards", "replicas") if fact in file.facts]
    return math.prod(groups) if groups else None


_OPTIONS: dict[str, Callable[[TrainerFile], object]] = {
    "model": _model,
    "seq_len": lambda file: file.needed("seq_len"),
    "batch_size": lambda file: file.needed("batch_size") * file.sequences_per_row,
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


def flag(option: str) -> str:
    """An option as it is typed: `--seq-len`."""
    return "--" + option.removesuffix("_blocks").replace("_", "-")


def words(options: Mapping[str, Any], option: str) -> str:
    """An option with its value, as it is typed; empty where it is not given."""
    value = options.get(option)
    if value is None or value is True:
        return flag(option) if value else ""
    return f"{flag(option)} {shlex.quote(str(value))}"


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


def _is_off(value: Any) -> bool:
    """Whether a value switches a feature off."""
    words = ("", "no", "none", "off", "false", "disabled", "null", "0")
    return not value or (isinstance(value, str) and value.lower() in words)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _SlipError("a text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _SlipError("true or false")
    return value


def _number(value: Any, what: str = "a number") -> float:
    """A number, as a text too: `1e-1` is one in YAML 1.1, and trainers make it a number."""
    try:
        return float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise _SlipError(what) from None


def _count(value: Any) -> int:
    number = _number(value, what := "a whole number above 0")
    if not number.is_integer() or number < 1:
        raise (_WrongError if number.is_integer() else _SlipError)(what)
    return int(number)


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, in a list or joined by commas; `all` and `all-linear` are all layers."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _SlipError("names of modules")
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise _WrongError("names of modules")
    return (ALL_LINEAR,) if names in (["all"], [ALL_LINEAR]) else tuple(dict.fromkeys(names))


def _one_of(meanings: Mapping[Any, Any], value: Any) -> Any:
    """The meaning of a value; a flag is not taken for a number, and `off` is any that is off."""
    if "off" in meanings and _is_off(value):
        return meanings["off"]
    for word, meaning in meanings.items():
        if repr(word) == repr(value):
            return meaning
    known = [str(one).lower() if isinstance(one, bool) else str(one) for one in meanings]
    alike = type(value) in map(type, meanings)
    said = ", ".join(one for one in known if one != "off")
    raise (_WrongError if alike else _SlipError)(f"one of {said}")


def _no_switch(value: Any) -> dict[str, Any]:
    """A switch of an optimizer with states of its own, which no option has."""
    if not _is_off(value):
        raise _WrongError("false, since no option has this optimizer as it is there")
    return {}


def _unread(value: Any) -> Any:
    raise _WrongError("no value, since it is not read")


def _loaded(value: Any) -> dict[str, Any]:
    """A dtype that a model is loaded in."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    known = {long: long for long in names.values()} | names
    loaded = _one_of(known, str(value).removeprefix("torch."))
    halves = {half: True for half in ("bf16", "fp16") if names[half] == loaded}
    return {"loaded": loaded, **(halves or {"dtype": loaded})}


def _builder(value: Any) -> dict[str, Any]:
    """`torchtune.models.llama3_1.qlora_llama3_1_8b`: the model, adapters, packed weights.

    The preset of its name has its sizes (vocabulary, layers, heads, widths), as was compared for
    all builders of that version.
    """
    builder = _text(value).rpartition(".")[2]
    model = re.sub(r"^q?lora_", "", builder)
    plain = re.sub(r"_(base|instruct)$|_", "", model)
    presets = {re.sub(r"[-.]", "", name): name for name in preset_names()} | _TABLES["builders"]
    method = builder.removesuffix(model).removesuffix("_")
    facts = {"model": presets.get(model, presets.get(plain, model)), "method": method}
    return facts | ({"bits4": True} if method == "qlora" else {})


_READERS: dict[str, Callable[[Any], Any]] = {
    "flag": _flag,
    "text": _text,
    "count": _count,
    "number": _number,
    "names": _names,
    "attention": lambda value: tuple(
        name.replace("output_proj", "o_proj") for name in _names(value)
    ),
    "builder": _builder,
    "second": lambda value: {"beside": _builder(value)["model"]},
    "loaded": _loaded,
    "no_switch": _no_switch,
    "unread": _unread,
}
_PLACEHOLDER = re.compile(r"auto|.*(\$\{|\{\{).*", re.S)
"""A text in a value's place, which a trainer or a template fills."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("|".join(text.split()))


def _formats() -> list[Format]:
    """The tables, with what each takes over of the one that it is like."""
    tables: dict[str, dict[str, Any]] = {}
    for name, own in _TABLES["formats"].items():
        like = tables.get(own.pop("like", ""), dict.fromkeys(("keys", "defaults", "harmless"), {}))
        merged = {e: own.get(e, {}) | like[e] | own.get(e, {}) for e in ("keys", "defaults", "harmless")}
        patterns = {e: f"{like.get(e, '')} {own.get(e, '')}" for e in ("decided", "ignored")}
        tables[name] = like | own | merged | patterns
    return [
        Format(
            **table
            | {"name": name}
            | {entry: _pattern(table[entry]) for entry in ("decided", "ignored")}
            | {entry: Switch(**table[entry]) for entry in ("checkpointing", "offloading")}
        )
        for name, table in tables.items()
        if "marks" in table
    ]


_FEATURES, _DEGREES = _pattern(_TABLES["features"]), _pattern(_TABLES["degrees"])
_FORMATS = _formats()
FORMATS = sorted((one for one in _FORMATS if not one.refused), key=lambda one: one.rank)
