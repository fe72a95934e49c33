"""Configuration files of trainers, read as options of `fit` and `plan`. No torch, no network.

A format is a table of rows: a key of the file, the fact that it states, and how its value is read.
The formats share one vocabulary of facts, and `_OPTIONS` makes the options of facts. What no table
names is listed, and what the options cannot say is one error.

Read from the projects' own code and examples: Axolotl at 067b021c (schemas, `loaders/model.py`),
LLaMA-Factory at ff6d4d12 (`hparams`, `model/adapter.py`), torchtune at bd2a0fc7 (recipes,
`models/*/_model_builders.py`), transformers 5.23 (`TrainingArguments`) with TRL's `SFTConfig` and
`ModelConfig`.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from protrain_plan.models.presets import preset_of, read_config
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.adapters import ALL_LINEAR, Lora
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.tree import Node, listed, parsed_json, root

Options = dict[str, Any]
"""Options of `fit` and `plan` by their fields, and `model`."""


class _UnclearError(Exception):
    """A value of a key that is listed as not understood."""


class _WrongError(Exception):
    """A value that no option says; the argument is what was expected."""


Reader = Callable[[Any], Any]
Row = tuple[str, Reader]
"""A fact and how it is read; of no fact, what takes no memory, and of `PLAN` what it decides."""

PLAN = "plan"


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

    `base` says what adapters of 16-bit models have the dtype of: the base, instead of float32;
    `packed_base` says so of packed weights alone. A null of `nulls` is no default, as others are.
    `full` is the precision of a training without adapters, and `sharded` that with ZeRO or FSDP.
    `follows` is how its trainer follows a plan.
    """

    name: str
    marks: tuple[str, ...]
    rows: Mapping[str, Row]
    defaults: Mapping[str, object]
    decided: re.Pattern[str]
    ignored: re.Pattern[str]
    checkpointing: Switch
    offloading: Switch
    full: str
    nulls: tuple[str, ...] = ()
    follows: str = 'use_plan(trainer, "plan.yaml")'
    adapters: str = "pure"
    sharded: str = ""
    base: bool = False
    packed_base: bool = False

    def key_of(self, fact: str) -> str | None:
        """The key that says a fact in such files."""
        return next((key for key, row in self.rows.items() if row[0] == fact), None)


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
    decides in its place, `ignored` what takes no memory of a step.
    """

    path: str
    format: Format
    options: Options
    understood: tuple[Stated, ...]
    by_default: tuple[Stated, ...]
    decided: Mapping[str, object]
    ignored: Mapping[str, object]
    not_understood: Mapping[str, object]

    @property
    def command(self) -> str:
        """The model and its options as they are typed."""
        options = (words(self.options, option) for option in self.options if option != "model")
        return " ".join((str(self.options["model"]), *options))

    def value_of(self, key: str) -> object:
        """The value that the file, or the trainer by default, has for a key."""
        return next(
            (one.value for one in (*self.understood, *self.by_default) if one.key == key), None
        )


def is_trainer_file(path: str) -> bool:
    """Whether a MODEL argument is such a file: any YAML, and JSON with keys of a trainer."""
    suffix = Path(path).suffix.lower()
    if suffix != ".json" or not Path(path).is_file():
        return suffix in (".yaml", ".yml")
    keys = _nodes(path)
    return "model_type" not in keys and bool(_candidates(keys))


def read_trainer_file(path: str, *, given: Collection[str] = ()) -> TrainerFile:
    """Read a trainer's file; the options that are `given` elsewhere are not asked of it.

    ProtrainError for a file of no known trainer or of several, for a value that no option says, and
    for what an answer needs and neither the file nor its trainer's default says.
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


def _candidates(keys: Collection[str]) -> list[Format]:
    """The formats with such keys; TRL, and then the Trainer, only where no other has any."""
    found = [one for one in FORMATS if any(mark in keys for mark in one.marks)]
    return [one for one in found if one not in (TRL, TRAINER)] or found[:1]


def _format_of(path: str, keys: Collection[str]) -> Format:
    found = _candidates(keys)
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
        if self.facts.get("bf16") == "auto" and self.facts.get("fp16"):
            del self.facts["bf16"]  # else it is on: all devices here have it

    def _take(self, key: str, node: Node) -> None:
        """Put one key into a list."""
        rows, listed_in = self.format.rows, self.lists
        if any(key.rpartition(".")[0] in listed_in[name] for name in ("decided", "ignored")):
            return
        value = _plain(node)
        if value is None and key in self.format.nulls:
            self.facts.pop(rows[key][0], None)
        if key in rows and value is not None:
            fact, reader = rows[key]
            try:
                read = reader(value)
            except _UnclearError:
                listed_in["unclear"][key] = value
                return
            except _WrongError as wrong:
                if self._option(key) not in self.given:
                    raise node.expected(str(wrong), self._fix(fact)) from None
                read = {}
            found = read if isinstance(read, dict) else {fact: read}
            self.facts |= found
            self.places |= dict.fromkeys(found, node)
            listed_in[{"": "ignored", PLAN: "decided"}.get(fact, "stated")][key] = value
        elif self.format.decided.fullmatch(key):
            listed_in["decided"][key] = value
        elif value is None or self.format.ignored.fullmatch(key):
            listed_in["ignored"][key] = value
        elif isinstance(value, dict) and value:
            pass  # its keys are told one by one
        else:
            listed_in["unclear"][key] = value

    def file(self) -> TrainerFile:
        options: Options = {}
        for option, make in _OPTIONS.items():
            if option not in self.given and (value := make(self)) not in (None, "", False):
                options[option] = value

        def stated(keys: Mapping[str, object]) -> tuple[Stated, ...]:
            return tuple(
                Stated(key=key, value=value, option=words(options, self._option(key)))
                for key, value in keys.items()
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
            not_understood=self.lists["unclear"],
        )

    def _option(self, key: str) -> str:
        fact = self.format.rows[key][0]
        return _OPTION_OF.get(fact, fact)

    def _fix(self, fact: str) -> str | None:
        option = _OPTION_OF.get(fact, fact)
        if option not in _OPTIONS or fact == "method":  # another method is no value of --lora
            return None
        return f"say it with {flag(option)}"

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
    def has_adapters(self) -> bool:
        return self.facts.get("method") in ("lora", "qlora")

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO or FSDP trains: their masters are of float32."""
        keys = [key for key, value in self.lists["decided"].items() if value]
        return any(key.startswith(("deepspeed", "fsdp")) for key in keys)


# Options of facts


def _model(file: _Reading) -> str:
    name = file.needed("model", "which model it trains")
    known = name if read_config(name) is not None else _BUILDERS.get(name) or preset_of(name)
    if known is None:
        raise file.error(
            "model",
            f"no configuration is known of the model {cut(name)!r}",
            "name a preset of the same sizes (protrain models) or a config.json with --model",
        )
    return str(known)


def _dtype(file: _Reading) -> str:
    facts = file.facts
    if facts.get("bf16") and facts.get("fp16"):
        raise file.error("fp16", "bf16 and fp16 are both on", "set one of them to false")
    if facts.get("bf16") or facts.get("pure"):
        return "bfloat16"
    return "float16" if facts.get("fp16") else str(file.needed("dtype", "the dtype"))


def _precision(file: _Reading) -> str:
    facts, trainer = file.facts, file.format
    full = trainer.sharded if trainer.sharded and file.is_sharded else trainer.full
    precision = trainer.adapters if file.has_adapters else full
    halves = facts.get("bf16") or facts.get("fp16")
    if trainer.key_of("loaded"):
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
    is_base = file.format.base or (file.format.packed_base and _quantize(file))
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
    "batch_size": lambda file: file.needed("batch_size", "how many sequences a batch has"),
    "accumulate": lambda file: file.facts["accumulate"],
    "num_devices": _num_devices,
    "dtype": _dtype,
    "precision": _precision,
    "lora": _lora,
    "quantize": _quantize,
    "optimizer": lambda file: file.needed("optimizer", "its optimizer"),
    "compile_blocks": lambda file: file.facts.get("compile_blocks"),
    "clip": lambda file: (file.facts.get("clip") or 0) > 0,
}
_OPTION_OF = {
    **dict.fromkeys(("method", "rank", "alpha", "dropout", "targets", "all_linear"), "lora"),
    **dict.fromkeys(("mlp", "head", "rslora", "dora", "modules_to_save"), "lora"),
    **dict.fromkeys(("bits", "bits_by", "bits4", "bits8", "nested"), "quantize"),
    **dict.fromkeys(("bf16", "fp16"), "dtype"),
    **dict.fromkeys(("pure", "loaded"), "precision"),
    **dict.fromkeys(("shards", "replicas"), "num_devices"),
}
"""Options that several facts make, by fact; of the others, they have its name."""


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
        raise _WrongError("true or false")
    return value


def _besides(fact: str) -> Reader:
    """A reader of a second key that turns a fact on, and never off."""
    return lambda value: {fact: True} if _flag(value) else {}


def _count(value: Any) -> int:
    number = _number(value, "a whole number above 0")
    if number < 1 or not number.is_integer():
        raise _WrongError("a whole number above 0")
    return int(number)


def _number(value: Any, what: str = "a number") -> float:
    """A number, as a text too: `1e-1` is one in YAML 1.1, and trainers make it a number."""
    try:
        return float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongError(what) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongError("a text")
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, in a list or joined by commas; `all` and `all-linear` are all layers."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(
        isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) for name in names
    ):
        raise _WrongError("names of modules")
    return (ALL_LINEAR,) if names in (["all"], [ALL_LINEAR]) else tuple(dict.fromkeys(names))


def _one_of(meanings: Mapping[Any, Any]) -> Reader:
    """A reader of certain values alone; a flag is not taken for a number."""

    def read(value: Any) -> Any:
        for word, meaning in meanings.items():
            if type(word) is type(value) and word == value:
                return meaning
        known = [str(word).lower() if isinstance(word, bool) else str(word) for word in meanings]
        raise _WrongError(f"one of {', '.join(known)}")

    return read


def _as(*meant: Any) -> Reader:
    """A reader of values that change nothing; others are listed as not understood."""

    def read(value: Any) -> Any:
        if not any(type(one) is type(value) and one == value for one in meant):
            raise _UnclearError
        return value

    return read


_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion8bit"),
    **{name: name for name in ("sgd", "rmsprop")},
}
"""Names of `TrainingArguments.optim`. Where states of a paged one are is what the plan decides.

Not bitsandbytes' of 32 bits: its states of 16-bit parameters are float32, those of PyTorch 16 bits.
"""
_TORCHTUNE_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    **dict.fromkeys(
        ("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.PagedAdamW8bit"), "adamw8bit"
    ),
}
_ATTENTION: Row = ("", _as("flash_attention_2", "sdpa", "fa2", "auto", "flash_attention_3"))
"""Kernels that keep no matrix of scores, as the models here have."""


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
    return {"model": model, "method": method} | ({"bits4": True} if method == "qlora" else {})


def _attention_modules(value: Any) -> tuple[str, ...]:
    return tuple(name.replace("output_proj", "o_proj") for name in _names(value))


# Formats

_LOGS = (
    r"(wandb|swanlab|comet|mlflow|trackio|hub|logging|log|eval|evals|save|saves|warmup|dataloader"
    r"|lr|ray|ddp|dataset|preprocessing|metric|push_to_hub|load_best|greater|prediction|profiler)"
    r"(_.*|\..*)?"
)
"""Keys of logs, checkpoints, data and schedules: nothing of it is in a step's memory."""
_STEPS = (
    r"learning_rate|weight_decay|adam_\w+|num_(train_)?epochs|epochs|max_steps|seed|data_seed"
    r"|output_dir|overwrite_\w+|resume_from_checkpoint|auto_resume_\w+|report_to|run_name|tf32"
    r"|remove_unused_columns|group_by_length|do_(train|eval|predict)|disable_tqdm"
    r"|per_device_eval_batch_size|trust_remote_code|train_sampling_strategy|debug|local_rank"
)
_OF_A_PLAN = (
    r"gradient_checkpointing(_.*|\..*)?|activation_offloading(\..*)?|deepspeed(\..*)?"
    r"|fsdp(_.*|\..*)?|activation_checkpointing\w*|offload_\w+"
)


def _pattern(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts))


AXOLOTL = Format(
    name="Axolotl",
    marks=("base_model", "micro_batch_size", "sequence_len"),
    rows={
        "base_model": ("model", _text),
        "sequence_len": ("seq_len", _count),
        "micro_batch_size": ("batch_size", _count),
        "gradient_accumulation_steps": ("accumulate", _count),
        "dp_shard_size": ("shards", _count),
        "dp_replicate_size": ("replicas", _count),
        "bf16": ("bf16", _one_of({True: True, False: False, "auto": "auto", "full": True})),
        "bfloat16": ("bf16", _besides("bf16")),
        "fp16": ("fp16", _flag),
        "float16": ("fp16", _besides("fp16")),
        "adapter": ("method", _one_of({"lora": "lora", "qlora": "qlora"})),
        "lora_r": ("rank", _count),
        "lora_alpha": ("alpha", _count),
        "lora_dropout": ("dropout", _number),
        "lora_target_modules": ("targets", _names),
        "lora_target_linear": ("all_linear", _flag),
        "lora_modules_to_save": ("modules_to_save", _names),
        "peft_use_rslora": ("rslora", _flag),
        "peft_use_dora": ("dora", _flag),
        "load_in_4bit": ("bits4", _flag),
        "load_in_8bit": ("bits8", _flag),
        "optimizer": ("optimizer", _one_of(_OPTIMIZERS)),
        "max_grad_norm": ("clip", _number),
        "sample_packing": ("packing", _flag),
        "pad_to_sequence_len": ("packing", _flag),
        "attn_implementation": _ATTENTION,
        "flash_attention": ("", _as(True)),
    },
    defaults={
        "seq_len": 512,
        "batch_size": 1,
        "accumulate": 1,
        "bf16": "auto",
        "dtype": "float32",
        "optimizer": "adamw",
        "clip": 1.0,
    },
    nulls=("bf16",),
    decided=_pattern(_OF_A_PLAN),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"datasets|test_datasets|val_set_size|chat_template\w*|special_tokens(\..*)?|tokens(\..*)?"
        r"|tokenizer_\w+|train_on_inputs|shuffle_\w+|strict|loss_watchdog_\w+|eot_tokens"
        r"|early_stopping_patience|skip_prepare_dataset|model_type|processor_type",
    ),
    checkpointing=Switch(keys=("gradient_checkpointing",)),
    offloading=Switch(keys=("activation_offloading",)),
    full="pure",
    sharded="master",
)

_TRAINING_ARGUMENTS: dict[str, Row] = {
    "model_name_or_path": ("model", _text),
    "per_device_train_batch_size": ("batch_size", _count),
    "gradient_accumulation_steps": ("accumulate", _count),
    "bf16": ("bf16", _flag),
    "fp16": ("fp16", _flag),
    "optim": ("optimizer", _one_of(_OPTIMIZERS)),
    "max_grad_norm": ("clip", _number),
    "label_smoothing_factor": ("", _as(0.0, 0)),
}
_OF_ADAPTERS: dict[str, Row] = {
    "lora_alpha": ("alpha", _count),
    "lora_dropout": ("dropout", _number),
    "use_rslora": ("rslora", _flag),
    "use_dora": ("dora", _flag),
    "packing": ("packing", _flag),
}
"""Keys that LLaMA-Factory and TRL have beside `TrainingArguments`."""

LLAMA_FACTORY = Format(
    name="LLaMA-Factory",
    marks=("finetuning_type", "cutoff_len", "template"),
    rows={
        **_TRAINING_ARGUMENTS,
        **_OF_ADAPTERS,
        "cutoff_len": ("seq_len", _count),
        "pure_bf16": ("pure", _flag),
        "finetuning_type": ("method", _one_of({"full": "", "lora": "lora"})),
        "lora_rank": ("rank", _count),
        "lora_target": ("targets", _names),
        "additional_target": ("modules_to_save", _names),
        "quantization_bit": ("bits", _one_of({4: "bits4", 8: "bits8"})),
        "quantization_method": ("bits_by", _one_of({"bnb": "bnb", "bitsandbytes": "bnb"})),
        "double_quantization": ("nested", _flag),
        "neat_packing": ("packing", _flag),
        "flash_attn": _ATTENTION,
        "stage": ("", _as("sft", "pt")),
    },
    defaults={
        "seq_len": 2048,
        "batch_size": 8,
        "accumulate": 1,
        "method": "lora",
        "rank": 8,
        "targets": (ALL_LINEAR,),
        "optimizer": "adamw",
        "clip": 1.0,
    },
    decided=_pattern(_OF_A_PLAN, r"disable_gradient_checkpointing|use_reentrant_gc"),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"template|max_samples|plot_loss|val_size|tokenized_path|cache_dir|media_dir|mask_history"
        r"|image_\w+_pixels|video_\w+",
    ),
    checkpointing=Switch(keys=("disable_gradient_checkpointing",), on=False, off=True),
    offloading=Switch(keys=("activation_offloading",)),
    full="autocast",
    sharded="master",
)

TORCHTUNE = Format(
    name="torchtune",
    marks=("model._component_",),
    rows={
        "model._component_": ("model", _component),
        "tokenizer.max_seq_len": ("seq_len", _count),
        "batch_size": ("batch_size", _count),
        "gradient_accumulation_steps": ("accumulate", _count),
        "dtype": ("dtype", _one_of({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})),
        "model.lora_rank": ("rank", _count),
        "model.lora_alpha": ("alpha", _count),
        "model.lora_dropout": ("dropout", _number),
        "model.lora_attn_modules": ("targets", _attention_modules),
        "model.apply_lora_to_mlp": ("mlp", _flag),
        "model.apply_lora_to_output": ("head", _flag),
        "model.use_dora": ("dora", _flag),
        "model.quantize_base": ("bits4", _flag),
        "optimizer._component_": ("optimizer", _one_of(_TORCHTUNE_OPTIMIZERS)),
        "clip_grad_norm": ("clip", _number),
        "compile": ("compile_blocks", _flag),
        "dataset.packed": ("packing", _flag),
        "loss._component_": (
            PLAN,
            _as(
                "torchtune.modules.loss.LinearCrossEntropyLoss",
                "torchtune.modules.loss.CEWithChunkedOutputLoss",
            ),
        ),
        "device": ("", _as("cuda")),
    },
    defaults={"accumulate": 1, "rank": 8, "alpha": 16},
    decided=_pattern(
        r"enable_activation_\w+|optimizer_in_bwd|fsdp(_.*|\..*)?|custom_sharded_layers"
        r"|memory_efficient_fsdp_wrap"
    ),
    ignored=_pattern(
        _LOGS,
        _STEPS,
        r"(checkpointer|metric_logger|profiler|lr_scheduler|dataset_val|dataset)\..*|shuffle"
        r"|tokenizer\.\w+|optimizer\.(lr|fused|weight_decay|betas|eps)|max_steps_per_epoch"
        r"|save_\w+|run_val_every_n_steps|batch_size_val|log_\w+",
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
    rows={
        **_TRAINING_ARGUMENTS,
        "max_seq_length": ("seq_len", _count),
        "dtype": ("loaded", _dtype_of),
        "torch_dtype": ("loaded", _dtype_of),
        "attn_implementation": _ATTENTION,
        "torch_compile": ("", _as(False)),
        "auto_find_batch_size": ("", _as(False)),
        "use_liger_kernel": ("", _as(False)),
        "use_cpu": ("", _as(False)),
    },
    defaults={"batch_size": 8, "accumulate": 1, "optimizer": "adamw", "clip": 1.0},
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
    offloading=Switch(keys=("activation_offloading",)),
    full="autocast",
)

TRL = replace(
    TRAINER,
    name="TRL",
    marks=("use_peft", "max_length", "packing", "dataset_text_field"),
    rows={
        "max_length": ("seq_len", _count),
        **TRAINER.rows,
        **_OF_ADAPTERS,
        "use_peft": ("method", _one_of({True: "lora", False: ""})),
        "lora_r": ("rank", _count),
        "lora_target_modules": ("targets", _names),
        "lora_modules_to_save": ("modules_to_save", _names),
        "load_in_4bit": ("bits4", _flag),
        "load_in_8bit": ("bits8", _flag),
        "use_bnb_nested_quant": ("nested", _flag),
        "bnb_4bit_quant_type": ("bits_by", _one_of({"nf4": "nf4"})),
    },
    defaults={
        **TRAINER.defaults,
        "seq_len": 1024,
        "bf16": "auto",
        "loaded": "float32",
        "dtype": "float32",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "nested": False,
    },
    nulls=("max_length",),
    checkpointing=Switch(keys=TRAINER.checkpointing.keys, default=True),
    adapters="autocast",
    packed_base=True,
)

FORMATS = (AXOLOTL, LLAMA_FACTORY, TORCHTUNE, TRL, TRAINER)

_BUILDERS = {
    "gemma_2b": "gemma-2b",
    "gemma_7b": "gemma-7b",
    **{f"gemma2_{size}": f"gemma-2-{size}" for size in ("2b", "9b", "27b")},
    **{f"llama2_{size}": f"llama-2-{size}" for size in ("7b", "13b", "70b")},
    **{f"llama3_{size}": f"llama-3.1-{size}" for size in ("8b", "70b")},
    **{f"llama3_1_{size}": f"llama-3.1-{size}" for size in ("8b", "70b", "405b")},
    **{f"llama3_2_{size}": f"llama-3.2-{size}" for size in ("1b", "3b")},
    "llama3_3_70b": "llama-3.1-70b",
    "mistral_7b": "mistral-7b",
    "phi3_mini": "phi-3-mini",
    "phi4_14b": "phi-4",
    **{f"qwen2_{size}": f"qwen2.5-{size.replace('_', '.')}" for size in ("0_5b", "1_5b", "7b")},
    **{f"qwen2_5_0_5b{end}": "qwen2.5-0.5b" for end in ("", "_instruct")},
    **{
        f"qwen2_5_{size}{end}": f"qwen2.5-{size.replace('_', '.')}"
        for size in ("1_5b", "7b", "14b", "32b", "72b")
        for end in ("_base", "_instruct")
    },
    **{
        f"qwen3_{size}{end}": f"qwen3-{size.replace('_', '.')}"
        for size in ("0_6b", "4b", "8b", "14b", "32b")
        for end in ("", "_base", "_instruct")
    },
}
"""Presets by torchtune's builders, whose sizes (vocabulary, layers, heads, widths) were compared;
that of Llama 3.3 calls that of 3.1."""
