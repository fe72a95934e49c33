"""`load_source`: from a MODEL argument to a builder of the model and its batches.

Either a Hugging Face configuration (`ConfigSource`), with random weights and bytes of text, or the
user's own code (`FactorySource`). Building is deterministic in the seed and leaves the global
random states unchanged.
"""

import copy
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy

from protrain_plan.models.adapters import adapted
from protrain_plan.models.batches import (
    Batch,
    BatchRequest,
    batch_to,
    byte_tokens,
    classes,
    inputs_of,
    of_text_alone,
)
from protrain_plan.models.building import (
    computing_in,
    float_dtypes,
    moved,
    no_larger_than,
    parameter_dtype,
    seeded,
)
from protrain_plan.models.importing import imported, library, reason_of
from protrain_plan.models.presets import (
    JsonObject,
    is_factory,
    known_model,
    near_names,
    parse_config,
    read_config,
)
from protrain_plan.models.quantizing import as_made, packed_as_drawn, quantized, settled
from protrain_runtime.activations.compiled import refuse_wrapped
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.contract.records.words import did_you_mean
from protrain_runtime.devices.memory_meter import return_freed_memory
from protrain_runtime.devices.preflight import free_host_bytes
from protrain_runtime.states.absent import without_parameters

MAX_NUMBER = 2**31
"""The largest number of a configuration: tokens, positions, widths."""
MAX_LAYERS = 480
"""Most layers of an encoder or decoder: together at most a record's units."""
_COUNTS: tuple[tuple[int, re.Pattern[str]], ...] = (
    (MAX_LAYERS, re.compile(r"(^|_)(n_?)?(layers?|depths?|blocks|stages)$")),
    (16_384, re.compile(r"(^|_)(experts?|heads?|groups?)$")),
)
"""Most items built one by one, by the endings of their counts' keys."""
_MAX_DEPTH = 20


def refuse_numbers(config: JsonObject, *, source: str) -> None:
    """ProtrainError for an implausible number, which could fill the memory."""
    waiting: list[tuple[str, object, int]] = [("", config, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        last = key.rpartition(".")[2].partition("[")[0]
        if depth > _MAX_DEPTH:
            raise ProtrainError(f"nested more than {_MAX_DEPTH} deep", source=source)
        if isinstance(value, dict):
            prefix = f"{key}." if key else ""
            waiting += ((f"{prefix}{cut(name)}", each, depth + 1) for name, each in value.items())
        elif isinstance(value, list):
            waiting += ((f"{key}[{n}]", each, depth + 1) for n, each in enumerate(value))
        elif isinstance(value, int):
            most = min([MAX_NUMBER, *(most for most, words in _COUNTS if words.search(last))])
            if abs(value) > most:
                shown = value if abs(value) < 2**63 else "more than 2**63"
                raise ProtrainError(
                    f"expected a number of at most {most}, got {shown}", source=source, key=key
                )


@dataclass(frozen=True)
class ConfigSource:
    """A Hugging Face configuration, with random weights."""

    name: str  # the MODEL argument
    config: JsonObject
    mixed: ClassVar[torch.dtype | None] = None  # as in a factory

    @property
    def model_config(self) -> str:
        """For `Workload.model_config`: compact JSON, readable by `load_source`."""
        return json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    def build(self, workload: Workload, *, device: torch.device | str = "cpu") -> nn.Module:
        """The model on `device` in train mode, without a key-value cache, attention by sdpa.

        Weights are drawn on `device` (a CPU takes a minute per billion), packed ones on the CPU; on
        `meta` none are drawn. ProtrainError if transformers is missing or refuses the
        configuration, dtype and precision are incompatible, or the adapter does not fit.
        """
        dtype, adapter, quantize = workload.dtype, workload.adapter, workload.quantize
        stored = parameter_dtype(dtype, workload.precision)
        config, model_class = self._config_and_class()
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        device = torch.device(device)
        on_meta = device.type == "meta"
        home = torch.device("cpu") if quantize and not on_meta else device
        torch.empty(0, device=home)  # starts an accelerator, whose random state `seeded` restores

        def plain() -> nn.Module:
            made: nn.Module = model_class._from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=stored
            )
            return of_text_alone(made, model_class.__name__)

        with seeded(workload.seed), home:
            try:
                with no_larger_than(None, source=self.name):
                    model = (
                        packed_as_drawn(plain, workload, source=self.name)
                        if quantize and not on_meta
                        else plain()
                    )
            except (ProtrainError, DataDependentOutputException, DynamicOutputShapeException):
                raise  # those are about fake tensors: not the configuration's fault
            except Exception as error:  # a modelling file may fail in any way
                raise self._refused(error) from error
            model = quantized(model, quantize, adapter=adapter, dtype=dtype, source=self.name)
            model = adapted(model, adapter, source=self.name)
            model = settled(model, workload, source=self.name)
        if home != device:
            model.to(device)
        return computing_in(model, dtype, workload.precision).train()

    def batches(
        self, workload: Workload, *, text: Path | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[Batch]:
        """Endless batches for the architecture: see `inputs`.

        For a language model {"input_ids", "labels"}, both int64 [batch_size, seq_len]. Features
        other than tokens are in the parameters' dtype. ProtrainError if no batches are known for
        the architecture, it has fewer than 256 tokens, or fewer positions than `seq_len`.
        """
        stored = parameter_dtype(workload.dtype, workload.precision)
        config, model_class = self._config_and_class()
        request = BatchRequest(
            source=self.name, config=config, workload=workload, text=byte_tokens(text)
        )
        with self._explained():
            made = inputs_of(model_class.__name__, request)

        def moved_batches() -> Iterator[Batch]:
            while True:
                with self._explained():
                    inputs = next(made)
                yield batch_to(inputs, device, stored)

        return moved_batches()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """ProtrainError for effects of a configuration's number, such as a size of 0."""
        try:
            yield
        except (AttributeError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            raise self._refused(error) from error

    def _config_and_class(self) -> tuple[Any, Any]:
        """Both from transformers; ProtrainError if it is missing, or refuses the configuration."""
        transformers = library(
            "transformers",
            "a Hugging Face configuration needs the package transformers",
            source=self.name,
            fix="pip install transformers, or use package.module:factory",
        )
        refuse_numbers(self.config, source=self.name)
        # A copy: transformers writes into nested mappings, such as those of rotary embeddings.
        values = copy.deepcopy(self.config)
        values = {k: v for k, v in values.items() if k not in ("model_type", "use_cache")}
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise ProtrainError(
                "the configuration does not name its architecture",
                source=self.name,
                key="model_type",
                fix='a config.json as published with a model, such as {"model_type": "llama", ...}',
            )
        try:
            config = transformers.AutoConfig.for_model(model_type, **values, use_cache=False)
            config.get_text_config().use_cache = False  # with an image tower, too
        except Exception as error:  # its validators raise their own classes
            if model_type not in transformers.CONFIG_MAPPING:
                raise ProtrainError(
                    f"transformers {transformers.__version__} has no architecture"
                    f" {cut(model_type)!r}",
                    source=self.name,
                    key="model_type",
                    fix=did_you_mean(model_type, transformers.CONFIG_MAPPING),
                ) from error
            raise self._refused(error) from error
        return config, self._model_class(transformers, config)

    def _model_class(self, transformers: ModuleType, config: Any) -> Any:
        encodes = getattr(config, "is_encoder_decoder", False)
        architectures = config.architectures
        if architectures and not (
            isinstance(architectures, list) and all(isinstance(one, str) for one in architectures)
        ):
            raise ProtrainError(
                "expected a list of names of classes", source=self.name, key="architectures"
            )
        tasks = [
            *(("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ") if encodes else ()),
            *("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
            *("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION"),
        ]
        every = (classes(task).get(config.model_type) for task in tasks)
        named = architectures or [found for found in every if found]
        found = None
        if named:
            with suppress(Exception):  # a class with missing packages
                found = getattr(transformers, named[0], None)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
            raise ProtrainError(
                f"transformers {transformers.__version__} has no model class "
                f"{cut(named[0]) if named else 'with a loss'!r} for {config.model_type!r}",
                source=self.name,
                key="architectures",
            )
        return found

    def _refused(self, error: Exception) -> ProtrainError:
        problem = f"transformers refuses the configuration: {reason_of(error)}"
        return ProtrainError(problem, source=self.name)


_SHARE_OF_FREE_MEMORY = 0.5
"""For a model built only to see its batches; batches may take as much."""


@dataclass(eq=False)
class FactorySource:
    """`package.module:factory`: the user's function returns (module, iterable of batches).

    The working directory is searched first. `path/to/file.py:factory` runs a file, such as a
    training script. Arguments of `batches` do not change the user's batches.
    """

    model_config = ""

    name: str
    factory: Callable[[], object]
    # Of the last build: seed, batches.
    _data: tuple[int, Iterable[object]] | None = field(default=None, init=False)
    mixed: torch.dtype | None = field(default=None, init=False)
    """The dtype of most bytes in a mixed model: its tensors keep their own."""

    def build(self, workload: Workload, *, device: torch.device | str = "cpu") -> nn.Module:
        """The factory's model in train mode, with its adapter, quantised on request.

        Floating-point parameters and buffers get `precision`'s dtype; a mixed model and its batches
        stay unchanged. ProtrainError if dtype and precision are incompatible, the adapter does not
        fit, or no plan supports the factory's quantised weights.
        """
        dtype, adapter, quantize = workload.dtype, workload.adapter, workload.quantize
        stored = parameter_dtype(dtype, workload.precision)
        model, data = self._made(workload.seed)
        self._data = (workload.seed, data)
        with seeded(workload.seed):
            model = as_made(model, source=self.name)
            model = model if self.mixed else moved(model, dtype=stored)
            model = quantized(model, quantize, adapter=adapter, dtype=dtype, source=self.name)
            model = adapted(model, adapter, source=self.name)
        model = moved(model, device=device)
        model = settled(model, workload, source=self.name)
        return computing_in(model, dtype, workload.precision).train()

    def batches(
        self,
        workload: Workload,
        *,
        text: Path | None = None,  # noqa: ARG002 (the signature of every source)
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """The factory's batches on `device`; restarted, unless they are an iterator.

        Floating-point tensors are in the parameters' dtype, if there is one. Before `build`, the
        factory runs without memory for its model's parameters, if possible. ProtrainError if not,
        and the model would take half of the host's free memory.
        """
        stored, seed = parameter_dtype(workload.dtype, workload.precision), workload.seed
        if self._data is None or self._data[0] != seed:
            return_freed_memory()  # else the allocator keeps freed parameters' memory
            try:
                with without_parameters(adapters=False):
                    data = self._made(seed)[1]
            except ProtrainError:
                raise
            except Exception:  # noqa: BLE001 (the user's code, which may look at what is not there)
                most = int(_SHARE_OF_FREE_MEMORY * free_host_bytes())
                with no_larger_than(most, source=self.name):
                    data = self._made(seed)[1]
            self._data = (seed, data)
        kept = None if self.mixed else stored
        return (batch_to(batch, device, kept) for batch in _again_and_again(self._data[1]))

    def _made(self, seed: int) -> tuple[nn.Module, Iterable[object]]:
        try:
            inspect.signature(self.factory).bind()
        except TypeError as error:
            raise ProtrainError(
                f"the factory cannot be called without arguments: {error}",
                source=self.name,
                fix="give its arguments defaults, or name a function without any that calls it",
            ) from None
        with seeded(seed):
            made = self.factory()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ProtrainError(
                f"the factory returned {type(made).__name__}, not (nn.Module, batches)",
                source=self.name,
            )
        model, data = made
        refuse_wrapped(model, source=self.name)
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ProtrainError(
                f"the parameter '{lazy[0]}' has no shape yet",
                source=self.name,
                fix="give its layer the sizes: nn.Linear in place of nn.LazyLinear",
            )
        dtypes = float_dtypes(model)
        self.mixed = dtypes[0] if len(dtypes) > 1 else None
        if not isinstance(data, Iterable):
            raise ProtrainError(
                f"the factory's batches are {type(data).__name__}, which cannot be iterated",
                source=self.name,
            )
        return model, data


def _again_and_again(data: Iterable[object]) -> Iterator[object]:
    """The batches, restarting after the last one; once if `data` is an iterator."""
    ends = False
    while not ends:
        batches, ends = iter(data), True
        for batch in batches:
            ends = batches is data
            yield batch


ModelSource = ConfigSource | FactorySource


def load_source(model: str, *, model_config: str = "") -> ModelSource:
    """The source that a MODEL argument names.

    A preset's name, the path of a config.json (or its folder), or a factory in a module or a file:
    `package.module:factory`, `path/to/file.py:factory`. With `model_config`, the JSON of a record's
    `Workload.model_config`, the configuration comes from there: a profile works without the file.
    ProtrainError, with the nearest preset names, for an unknown model.
    """
    config = parse_config(model_config, where=model) if model_config else read_config(model)
    if config is not None:
        return ConfigSource(model if model_config else known_model(model), config)
    if is_factory(model):
        return FactorySource(model, imported(model))
    near = near_names(model)
    known = f"did you mean {' or '.join(near)}?" if near else "protrain models lists the presets"
    raise ProtrainError(
        f"no such model: {model!r} is not a preset, a config.json or package.module:factory",
        fix=known,
    )
