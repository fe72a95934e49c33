"""Estimates that were made before: files in the user's cache folder, named after the questions.

[Note: what is kept] Estimates and fingerprints of models whose code is that of installed libraries:
presets and configurations that transformers builds. What a factory's code depends on is not known,
so nothing of it is kept. Neither are estimates for a CPU, whose kernels may have been measured on
the processor at hand.

[Note: what the name holds] All that an answer depends on: the whole question with its configuration
and its machine, the bytes of our own source files, and of PyTorch, transformers and what they
compute with the version and the checksums of the installed files. Who edits an installed library by
hand is not seen, but for one that is installed as editable, or shadowed by another folder of the
same name: then nothing is kept.

[Note: who is believed] An entry is data: it is read as strictly as any record, has to answer the
question that it is read for, and has a checksum over its name and its content, so that a damaged or
renamed one is made anew. The checksum is no secret: whoever may write to the folder may write
answers. So the folder has to be the user's alone, outside the working directory and its repository;
and the process that looks at strangers' models neither reads nor writes after their code has run.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from protrain_plan.models.presets import JsonObject
from protrain_runtime.contract import __version__
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records import dumps_hardware, dumps_profile, loads_profile
from protrain_runtime.contract.records.files import read_text, replace_text
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import Profile, Workload

SWITCH = "PROTRAIN_NO_CACHE"
"""The environment variable that switches the cache off, whatever its value."""

_MOST_BYTES = 64 * 2**20
"""All entries together: some thousands. The oldest go first."""
_LIBRARIES = ("torch", "transformers")
_OPTIONAL = ("peft", "accelerate", "bitsandbytes", "numpy", "kernels")
_SETTINGS = ("TORCH", "PYTORCH", "TRANSFORMERS", "CUBLAS", "PEFT", "BNB")
"""How the names of environment variables begin that libraries may compute by."""
_ENTRY = re.compile(r"[0-9a-f]{64}\.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """A question to estimates, without the machine."""

    workload: Workload  # with the configuration as it is now, and nothing that is for measuring
    optimizer: str
    allow: tuple[str, ...] = ()

    @staticmethod
    def of(
        workload: Workload, optimizer: str, config: JsonObject | None, allow: tuple[str, ...] = ()
    ) -> "EstimateRequest | None":
        """The question about a workload's model as its configuration is now.

        None where code may run that is no installed library's: see [Note: what is kept].
        """
        if config is None or _names_code(config) or ":" in optimizer:
            return None
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        asked = replace(workload, model_config=text, device="cuda", inputs=(), deterministic=False)
        return EstimateRequest(workload=asked, optimizer=optimizer, allow=allow)

    def is_answered_by(self, profile: Profile, machine: Hardware) -> bool:
        """Whether a profile is of this question, on this machine."""
        config = json.loads(profile.workload.model_config or "null")
        asked = EstimateRequest.of(
            profile.workload, profile.optimizer.name, config, profile.allowed
        )
        return asked == self and profile.method == "estimated" and profile.hardware == machine


def _names_code(value: object) -> bool:
    """Whether a configuration names code that libraries would load: its own, or a hub's kernels."""
    if isinstance(value, dict):
        named = any(key == "auto_map" or "attn_implementation" in key for key in value)
        return named or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


class EstimateCache:
    """Answers of before; one that is `off`, or has no folder that is the user's alone, has none."""

    def __init__(self, *, off: bool = False) -> None:
        self._folder = None if off or SWITCH in os.environ else _folder()
        self._installed = None if self._folder is None else _installation()

    def close(self) -> None:
        """Neither read nor write from now on: a stranger's code runs."""
        self._folder = None

    def fingerprint(self, question: EstimateRequest) -> str | None:
        """The fingerprint of the question's model, None where it is not known."""
        found = self._read(question, "")
        return found if found and re.fullmatch(r"sha256:[0-9a-f]{16,64}", found) else None

    def keep_fingerprint(self, question: EstimateRequest, fingerprint: str) -> None:
        """Let `fingerprint` be known."""
        self._write(question, "", fingerprint)

    def profile(self, question: EstimateRequest, machine: Hardware) -> Profile | None:
        """The estimate for a machine, None where it is not known."""
        if machine.device.kind == "cpu":
            return None
        text = self._read(question, dumps_hardware(machine))
        try:
            profile = None if text is None else loads_profile(text)
        except RecordError:
            return None
        return profile if profile and question.is_answered_by(profile, machine) else None

    def keep_profile(self, question: EstimateRequest, profile: Profile) -> None:
        """Let an estimate be known."""
        machine = profile.hardware
        if machine.device.kind != "cpu" and question.is_answered_by(profile, machine):
            self._write(question, dumps_hardware(machine), dumps_profile(profile))

    def _entry(self, question: EstimateRequest, machine: str) -> tuple[Path, str] | None:
        """Where an answer is kept, and its name. See [Note: what the name holds]."""
        if self._folder is None or self._installed is None:
            return None
        name = _digest(json.dumps([asdict(question), machine, self._installed]))
        return self._folder / f"{name}.txt", name

    def _read(self, question: EstimateRequest, machine: str) -> str | None:
        if (entry := self._entry(question, machine)) is None:
            return None
        path, name = entry
        try:
            checksum, _, content = read_text(path).partition("\n")
        except RecordError:
            return None
        if checksum != _digest(name + content):
            return None
        with suppress(OSError):
            os.utime(path)  # the oldest is the one that was not asked for
        return content

    def _write(self, question: EstimateRequest, machine: str, content: str) -> None:
        if (entry := self._entry(question, machine)) is None:
            return
        path, name = entry
        with suppress(RecordError, OSError):  # a full disk is no reason to fail
            replace_text(path, f"{_digest(name + content)}\n{content}")
            # The oldest entries go, beyond `_MOST_BYTES`.
            files = os.scandir(path.parent)
            found = [(file.stat(), file.path) for file in files if _ENTRY.fullmatch(file.name)]
            size = sum(status.st_size for status, _ in found)
            for status, old in sorted(found, key=lambda entry: entry[0].st_mtime):
                if size > _MOST_BYTES:
                    Path(old).unlink(missing_ok=True)
                    size -= status.st_size


def _folder() -> Path | None:
    """The folder, made where it is missing; None where it is not the user's alone."""
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        above = named if named.is_absolute() else Path.home() / ".cache"
        folder = Path(os.path.realpath(above / "protrain-plan" / "estimates"))
        here = Path.cwd()
        repositories = [at for at in (here, *here.parents) if (at / ".git").exists()]
        if any(folder.is_relative_to(at) for at in (here, *repositories)):
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return None
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None


@lru_cache(maxsize=1)
def _installation() -> list[str] | None:
    """The installed packages, as texts; None where the installer's notes do not tell."""
    told = [__version__, sys.version, platform.machine()]
    for package in ("protrain_plan", "protrain_runtime"):
        spec = find_spec(package)
        folders = (spec.submodule_search_locations if spec else None) or ()
        told += [_digest_of_files(Path(folder)) for folder in folders]
    for name in (*_LIBRARIES, *_OPTIONAL):
        spec = find_spec(name)
        if spec is None and name in _OPTIONAL:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            return None
        record, origin = found.read_text("RECORD"), spec.origin if spec else None
        editable = '"editable": true' in (found.read_text("direct_url.json") or "")
        if record is None or origin is None or editable:
            return None
        if not Path(origin).is_relative_to(str(found.locate_file(name))):
            return None
        told += [name, found.version, _digest(record)]
    told += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_SETTINGS))
    return told


def _digest_of_files(folder: Path) -> str:
    paths: Iterable[Path] = (p for p in folder.rglob("*") if p.suffix in (".py", ".yaml", ".json"))
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
