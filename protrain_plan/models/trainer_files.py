"""Configuration files of trainers, read as options of `fit` and `plan`. No torch, no network.

`trainers.yaml` has a table per trainer: each key of its files states a fact, read in one way, and
`_OPTIONS` turns facts into options. Unknown keys, and settings without an option, are one error: an
answer is never for something else.
"""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from protrain_plan.models.presets import preset_names, preset_of, read_config
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.adapters import ALL_LINEAR, Lora
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import Document, Odd, key_of, parsed, parsed_json
from protrain_runtime.contract.records.words import listed

_TABLES: dict[str, Any] = yaml.load(
    read_text(Path(__file__).with_name("trainers.yaml")),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # an eighth of the time
)
_FACTS = {fact: (*row.split(maxsplit=2), "") for fact, row in _TABLES["facts"].items()}
_PLACEHOLDER = re.compile(r"auto|.*(\$\{|\{\{).*", re.S)  # a trainer or a template fills it


# Values


class _WrongError(Exception):
    """A value without an option: the expected one, and whether the type is wrong, too."""

    def __init__(self, expected: str, is_slip: bool = True) -> None:
        super().__init__(expected)
        self.is_slip = is_slip


def _plain(odd: Odd) -> Any:
    """The value as the trainer's parser reads it; as text if not JSON."""
    with suppress(ValueError):  # thousands of digits
        read = yaml.safe_load(odd.text)
        return odd.text if str(read) in ("inf", "-inf", "nan") else read
    return odd.text


def _is_off(value: Any) -> bool:
    """Whether a value switches a feature off."""
    words = ("", "no", "none", "off", "false", "disabled", "null", "0")
    return not value or (isinstance(value, str) and value.lower() in words)


def _typed(kind: type, expected: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _WrongError(expected)
    return value


def _number(value: Any, expected: str = "a number") -> float:
    """A number, also as text: `1e-1` is text in YAML 1.1, and trainers convert it."""
    try:
        return float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongError(expected) from None


def _count(value: Any) -> int:
    number = _number(value, expected := "a whole number above 0")
    if not number.is_integer() or number < 1:
        raise _WrongError(expected, not number.is_integer())
    return int(number)


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, in a list or joined by commas; `all` and `all-linear` are all layers."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    is_slip = not isinstance(names, list) or not all(isinstance(name, str) for name in names)
    if is_slip or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise _WrongError("names of modules", is_slip)
    return (ALL_LINEAR,) if names in (["all"], [ALL_LINEAR]) else tuple(dict.fromkeys(names))


def _one_of(meanings: Mapping[Any, Any], value: Any) -> Any:
    """The meaning of a value; flags are not numbers, and `off` is any false value."""
    if "off" in meanings and _is_off(value):
        return meanings["off"]
    for word, meaning in meanings.items():
        if repr(word) == repr(value):
            return meaning
    if known := [json.dumps(one).strip('"') for one in meanings if one != "off"]:
        is_slip = type(value) not in map(type, meanings)
        raise _WrongError(f"one of {', '.join(known)}", is_slip)
    only = "false" if "off" in meanings else "nothing"
    raise _WrongError(f"{only}, since no option has this as it is there", is_slip=False)


def _builder(value: Any) -> dict[str, Any]:
    """`torchtune.models.llama3_1.qlora_llama3_1_8b`: the model, adapters, packed weights.

    The preset of its name has its sizes (vocabulary, layers, heads, widths), as was compared for
    all builders of that version.
    """
    builder = _READERS["text"](value).rpartition(".")[2]
    model = re.sub(r"^q?lora_", "", builder)
    plain = re.sub(r"_(base|instruct)$|_", "", model)
    presets = {re.sub(r"[-.]", "", name): name for name in preset_names()} | _TABLES["builders"]
    facts = {"model": presets.get(model, presets.get(plain, model)), "adapters": model != builder}
    return facts | ({"qlora": True, "bits4": True} if builder.startswith("qlora_") else {})


_READERS: dict[str, Callable[[Any], Any]] = {
    "flag": partial(_typed, bool, "true or false"),
    "text": partial(_typed, str, "a text"),
    "count": _count,
    "number": _number,
    "is_positive": lambda value: _number(value) > 0,
    "names": _names,
    "attention": lambda value: tuple(n.replace("output_proj", "o_proj") for n in _names(value)),
    "builder": _builder,
    "second": lambda value: {"beside": _builder(value)["model"]},
    **{name: partial(_one_of, meanings) for name, meanings in _TABLES["values"].items()},
}


class Format(SimpleNamespace):
    """A trainer's file format from `trainers.yaml`; `keys` map to facts and parsers."""

    def key_of(self, fact: str) -> str | None:
        """The key for a fact in these files."""
        return next((key for key, (stated, _) in self.keys.items() if stated == fact), None)

    def read(self, key: str, value: object) -> dict[str, Any]:
        """The facts that a key states with a value."""
        fact, how = self.keys[key]
        read = _one_of(how, value) if isinstance(how, dict) else _READERS[how](value)
        return read if isinstance(read, dict) else {fact: read}

    def list_of(self, key: str, value: object) -> str:
        """The list of `TrainerFile` for a key with a value."""
        if key in self.keys and value is not None:
            return "understood"
        harmless = value is None or repr(value) in map(repr, self.harmless.get(key, ()))
        if key in self.harmless and not harmless:
            return "unclear"
        if _matches(self.decided, key):
            return "decided"
        is_off = _is_off(value) and _matches(_TABLES["features"], key)
        is_one = value in (1, -1) and _matches(_TABLES["degrees"], key)
        if harmless or is_off or is_one or _matches(self.ignored, key):
            return "ignored"
        return "in its keys" if isinstance(value, dict) and value else "unclear"


def _matches(patterns: str, key: str) -> bool:
    """Whether one of the space-separated patterns matches the whole key."""
    return re.fullmatch("|".join(patterns.split()), key) is not None


def _formats() -> Iterator[Format]:
    """The tables, each with inherited keys; its own come first."""
    tables: dict[str, dict[str, Any]] = {}
    for name, own in _TABLES["formats"].items():
        like = tables.get(own.get("like"), {})
        table = tables[name] = like | own
        for entry, value in own.items():
            if isinstance(value, dict):
                table[entry] = value | like.get(entry, {}) | value
            elif entry in ("decided", "ignored"):
                table[entry] = f"{like.get(entry, '')} {value}"
        for key, row in own.get("keys", {}).items():
            table["keys"][key] = (row, _FACTS[row][0]) if isinstance(row, str) else row
        yield Format(name=name, **table)


FORMATS = sorted((one for one in _formats() if one.marks), key=lambda one: int(one.rank))


def is_trainer_file(path: str) -> bool:
    """Whether a MODEL argument is a trainer's file: any YAML, and JSON with a trainer's keys."""
    suffix = Path(path).suffix.lower()
    if suffix != ".json" or not Path(path).is_file():
        return suffix in (".yaml", ".yml")
    keys = _nodes(path)
    marks = (*(one.marks for one in FORMATS), *(marks for marks, *_ in _TABLES["refused"]))
    return "model_type" not in keys and not keys.keys().isdisjoint(chain(*marks))


def _nodes(path: str) -> dict[str, Document]:
    """The values by key; nested ones by `key.inner`."""
    text = read_text(path)
    if Path(path).suffix.lower() == ".json":
        parsed_json(text, path)
        text = text.replace("\t", " ")  # blanks in JSON, but not in YAML
    found: dict[str, Document] = {}
    waiting = [parsed(text, path)]
    while waiting:
        for node in waiting.pop().mapping().values():
            found[str(key_of(node.path))] = node
            if isinstance(node.data, dict):
                waiting.append(node)
    return found


def _format_of(path: str, keys: Set[str]) -> Format:
    """The first format with such keys."""
    for marks, problem, fix in _TABLES["refused"]:
        if not keys.isdisjoint(marks):
            raise ProtrainError(problem, source=path, fix=fix)
    found = [one for one in FORMATS if not keys.isdisjoint(one.marks)]
    found = [one for one in found if one.rank == found[0].rank]
    if len(found) == 1:
        return found[0]
    if not found:
        problem = "not a configuration file of a known trainer"
        fix = f"known are {listed([f'{one.name} ({one.marks[0]})' for one in FORMATS], 'and')}"
    else:
        said = [f"{next(m for m in one.marks if m in keys)!r} of {one.name}" for one in found]
        problem = f"the file has keys of several trainers: {listed(said, 'and')}"
        fix = "keep those of one"
    raise ProtrainError(problem, source=path, fix=fix)


# Files


class TrainerFile:
    """A trainer's file: its settings as `options`, and its keys in lists.

    `understood` became options, and `by_default` are the trainer's defaults. `decided` keys are the
    plan's decisions, `ignored` ones take no memory of a step. `given` options, perhaps the `model`,
    are not read from the file.

    ProtrainError for an unknown or ambiguous trainer, unknown keys, values without an option, and
    missing facts that have no default.
    """

    def __init__(self, path: str, *, given: Collection[str] = (), model: str | None = None) -> None:
        nodes = _nodes(path)
        self.path, self.format, self.given = path, _format_of(path, nodes.keys()), given
        self.facts: dict[str, Any] = dict.fromkeys(_FACTS) | self.format.assumed
        for key, value in self.format.defaults.items():
            self.facts |= self.format.read(key, value)
        self._places: dict[str, Document] = {}  # of facts in the file
        names = ("understood", "decided", "ignored", "unclear", "in its keys")
        lists: dict[str, dict[str, object]] = {name: {} for name in names}
        self.understood, self.decided, self.ignored, unclear, _ = lists.values()
        for key, node in nodes.items():
            if key.rpartition(".")[0] not in self.decided | self.ignored:
                value = json.loads(json.dumps(node.data, default=_plain))
                lists[self.format.list_of(key, value)][key] = value
                if key in self.understood:
                    self._state(key, value, node)
                elif key in self.format.nulls:  # no default, unlike others
                    self.facts[self.format.keys[key][0]] = None
        if unclear:
            raise _not_understood(path, list(unclear))
        if self.facts["bf16"] == "auto" and self.facts["fp16"]:
            self.facts["bf16"] = None  # else it is on: all devices here support it
        for option, when, fact, problem, fix in _TABLES["checks"]:
            holds = (bool(self.facts[one.strip("-")]) != ("-" in one) for one in when.split())
            if option not in given and all(holds):
                raise self.error(fact, problem, fix)
        # The keys that turn on ZeRO or FSDP, with float32 masters.
        said = self.facts["sharded"]
        self.shards = [key for key in self.format.shards if said or self.decided.get(key)]
        # A row of pairs has a chosen and a rejected sequence.
        self.sequences_per_row = 2 if self.facts["pairs"] else 1
        made = {name: make(self) for name, make in _OPTIONS.items() if name not in given}
        self.options: dict[str, Any] = {"model": model} if model else {}
        self.options |= {name: value for name, value in made.items() if value}
        self.by_default = {
            key: value
            for key, value in self.format.defaults.items()
            if (fact := self.format.keys[key][0]) not in self._places
            if self.facts[fact] is not None and self.option_of(key)
        }

    def _state(self, key: str, value: object, node: Document) -> None:
        """Add the facts of a key in this file."""
        fact = self.format.keys[key][0]
        try:
            found = self.format.read(key, value)
        except _WrongError as wrong:
            is_slip = wrong.is_slip and not _PLACEHOLDER.fullmatch(str(value))
            if is_slip or _FACTS[fact][1] not in self.given:
                fix = "write such a value there" if is_slip else _fix(fact)
                raise node.expected(str(wrong), fix) from None
            return
        for name in found.keys() & self._places.keys():
            meant = {True if one == "auto" else one for one in (self.facts[name], found[name])}
            if all(meant) and len(meant) > 1 and _FACTS[name][1] not in self.given:
                problem = f"{key_of(self._places[name].path)} says otherwise"
                raise node.error(problem, "remove one of them")
        if found.get(fact) is not False or not (fact in self._places and self.facts[fact]):
            self.facts |= found  # else another key has turned it on
            self._places |= dict.fromkeys(found, node)

    def option_of(self, key: str) -> str:
        """The option from a key; empty if it is the default."""
        return self._words(_FACTS[self.format.keys[key][0]][1])

    @property
    def command(self) -> str:
        """The model and its options as typed."""
        options = (self._words(option) for option in self.options if option != "model")
        return " ".join((str(self.options["model"]), *options))

    def _words(self, option: str) -> str:
        """An option with its value, as typed; empty if not given."""
        value = self.options.get(option)
        if value is None or value is True:
            return _flag(option) if value else ""
        return f"{_flag(option)} {shlex.quote(str(value))}"

    def error(self, fact: str, problem: str, fix: str | None = None) -> ProtrainError:
        """An error at the present or possible key of a fact."""
        fix = fix or _fix(fact)
        if fact in self._places:
            return self._places[fact].error(problem, fix)
        return ProtrainError(problem, source=self.path, key=self.format.key_of(fact), fix=fix)

    def needed(self, fact: str) -> Any:
        """A fact that an answer requires."""
        if self.facts[fact] is None:
            raise self.error(fact, f"the file does not say {_FACTS[fact][2]}")
        return self.facts[fact]


def _not_understood(path: str, keys: list[str]) -> ProtrainError:
    problem = "its cost is unknown, so that an answer would be for a different job"
    advice = {
        fix: {key for key in keys if re.match(pattern, key)}
        for pattern, fix in _TABLES["advice"].items()
    }
    fixes = [fix for fix, meant in advice.items() if meant]
    if set().union(*advice.values()) < set(keys):
        fixes.append("remove it from a copy of the file if neither memory nor time depends on it")
    return ProtrainError(problem, source=path, key=", ".join(keys), fix="; ".join(fixes))


def _fix(fact: str) -> str | None:
    """The fix for a value without an option."""
    option = _FACTS[fact][1]
    fix: str | None = _TABLES["fixes"].get(fact)
    return fix or (f"say it with {_flag(option)}" if option in _OPTIONS else None)


def _flag(option: str) -> str:
    """An option as typed: `--seq-len`."""
    return "--" + option.replace("_", "-")


# Options of facts


def _model(file: TrainerFile, fact: str = "model") -> str:
    name = file.needed(fact)
    if read_config(name) is None:
        problem = f"the configuration of the model {cut(name)!r} is unknown"
        fix = "name a preset of the same sizes (protrain models) or a config.json with"
        raise file.error(fact, problem, f"{fix} {_flag(fact)}")
    return preset_of(name) or str(name)


def _devices(file: TrainerFile) -> int | None:
    shards, replicas = file.facts["shards"], file.facts["replicas"]
    return (shards or 1) * (replicas or 1) if shards or replicas else None


def _dtype(file: TrainerFile) -> str:
    facts = file.facts
    if file.format.alone and not (facts["adapters"] or file.shards):
        return str(file.format.alone)
    if facts["bf16"] or facts["pure"]:
        return "bfloat16"
    return "float16" if facts["fp16"] else str(file.needed("dtype"))


def _precision(file: TrainerFile) -> str:
    facts, table = file.facts, file.format
    sharded = table.sharded if file.shards and not facts["adapters"] else ""
    halves = facts["bf16"] or facts["fp16"]
    if table.key_of("loaded") and not sharded:  # with masters in any case
        halves = halves and file.needed("loaded") == "float32"
    if facts["pure"] or not (halves or table.base):  # all in one dtype
        return "pure"
    return str(sharded or (table.adapters if facts["adapters"] else table.full) or "pure")


def _lora(file: TrainerFile) -> str | None:
    facts, table = file.facts, file.format
    if not facts["adapters"]:
        return None
    targets = (
        *(facts["targets"] or ()),
        *(("gate_proj", "up_proj", "down_proj") if facts["mlp"] else ()),
        *(("lm_head",) if facts["head"] else ()),
    )
    if facts["all_linear"] and not {"lm_head", "embed_tokens"}.isdisjoint(targets):
        problem = "--lora adapts all linear layers or named ones, not both"
        raise file.error("targets", problem, "name those to adapt with --lora")
    is_all = facts["all_linear"] or ALL_LINEAR in targets
    is_packed = facts["bits4"] or facts["bits8"]
    is_base = table.base or (table.packed_base and is_packed) or facts["pure"]
    rank = file.needed("rank")
    others = ("alpha", "dropout", "rslora", "dora", "modules_to_save")
    return Lora(
        rank=rank,
        targets=(ALL_LINEAR,) if is_all else targets,
        dtype="base" if is_base else "float32",
        **{"alpha": 2 * rank} | {name: facts[name] for name in others if facts[name]},
    ).option


def _optimizer(file: TrainerFile) -> str:
    name: str = file.needed("optimizer")
    adapters = file.facts["adapters"] and not (file.format.base or file.facts["pure"])
    halves = not adapters and _precision(file) == "pure" and _dtype(file) != "float32"
    if file.facts["float32_states"] and halves:
        problem = "no option combines float32 states with 16-bit parameters"
        fix = "use --optimizer adamw (16 bits), or with --precision master (float32, and copies)"
        raise file.error("optimizer", problem, fix)
    return name


def _beside(file: TrainerFile) -> str | None:
    """A frozen second model: a teacher, or the reference of pairs."""
    if file.facts["beside"]:
        return _model(file, "beside")
    if not file.facts["pairs"] or file.facts["alone"]:
        return None
    if "model" in file.given:
        raise file.error("pairs", "its reference is a copy of the model", "name it: --beside MODEL")
    return _model(file)


_OPTIONS: dict[str, Callable[[TrainerFile], object]] = {
    "model": _model,
    "seq_len": lambda file: file.needed("seq_len"),
    "batch_size": lambda file: file.needed("batch_size") * file.sequences_per_row,
    "accumulate": lambda file: file.facts["accumulate"],
    "num_devices": _devices,
    "dtype": _dtype,
    "precision": _precision,
    "lora": _lora,
    "quantize": lambda file: (
        "nf4" if file.facts["bits4"] else "int8" if file.facts["bits8"] else None
    ),
    "optimizer": _optimizer,
    "compile": lambda file: file.facts["compile"],
    "clip": lambda file: file.facts["clip"],
    "beside": _beside,
}
