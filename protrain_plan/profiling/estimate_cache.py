"""Estimates that were made before: files in the user's cache folder, named after the questions.

[Note: what is kept] Estimates and fingerprints of models whose code is that of installed libraries:
presets and configurations that transformers builds. What a factory's code depends on is not known,
so nothing of it is kept. Neither are estimates for a CPU, whose kernels may have been measured on
the processor at hand. A profile that is read has to answer the question that it is read for.

`kept` says what else the names hold, and who is believed.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from protrain_plan.cache import Kept
from protrain_plan.models.presets import JsonObject
from protrain_plan.profiling.tally import Tally, dumps_tally, loads_tally
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.profile import Profile, Workload

_LIBRARIES = ("torch", "transformers")
_OPTIONAL = ("peft", "accelerate", "bitsandbytes", "numpy", "kernels")
_SETTINGS = ("TORCH", "PYTORCH", "TRANSFORMERS", "CUBLAS", "PEFT", "BNB")
"""How the names of environment variables begin that libraries may compute by."""


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

    def is_answered_by(self, profile: Profile) -> bool:
        """Whether an estimate is of this question."""
        config = json.loads(profile.workload.model_config or "null")
        asked = EstimateRequest.of(
            profile.workload, profile.optimizer.name, config, profile.allowed
        )
        on_card = profile.workload.device == self.workload.device
        return asked == self and profile.method == "estimated" and on_card


def _names_code(value: object) -> bool:
    """Whether a configuration names code that libraries would load: its own, or a hub's kernels."""
    if isinstance(value, dict):
        named = any(key == "auto_map" or "attn_implementation" in key for key in value)
        return named or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


class EstimateCache(Kept):
    """Estimates and fingerprints that were made before."""

    def __init__(self, *, off: bool = False) -> None:
        super().__init__("estimates", _LIBRARIES, _OPTIONAL, _SETTINGS, off=off)

    def fingerprint(self, question: EstimateRequest) -> str | None:
        """The fingerprint of the question's model, None where it is not known."""
        found = self._read(_named(question, "fingerprint"))
        return found if found and re.fullmatch(r"sha256:[0-9a-f]{16,64}", found) else None

    def keep_fingerprint(self, question: EstimateRequest, fingerprint: str) -> None:
        """Cache `fingerprint`."""
        self._write(_named(question, "fingerprint"), fingerprint)

    def tally(self, question: EstimateRequest) -> Tally | None:
        """The estimate for every machine with a card, None where it is not known."""
        text = self._read(_named(question, "tally"))
        with suppress(RecordError):
            tally = None if text is None else loads_tally(text)
            return tally if tally and question.is_answered_by(tally.profile) else None
        return None

    def keep_tally(self, question: EstimateRequest, tally: Tally) -> None:
        """Cache an estimate."""
        if question.is_answered_by(tally.profile):
            self._write(_named(question, "tally"), dumps_tally(tally))


def _named(question: EstimateRequest, what: str) -> str:
    return json.dumps([asdict(question), what])
