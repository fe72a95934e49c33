"""Cached estimates: files in the user's cache folder, named after their questions.

[Note: what is kept] Estimates and fingerprints of models from installed libraries' code: presets
and configurations that transformers builds. A factory's code has unknown dependencies: it is not
cached. Nor are estimates for a CPU, whose kernels may be measured on the present processor. A
profile that is read must answer its question.

`cache` says what else the names contain, and whose files are trusted.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """A question for estimates, without the machine."""

    workload: Workload  # with the present configuration, without settings for measuring
    optimizer: str
    allow: tuple[str, ...] = ()

    @staticmethod
    def of(
        workload: Workload, optimizer: str, config: JsonObject | None, allow: tuple[str, ...] = ()
    ) -> "EstimateRequest | None":
        """The question about a workload's model with its present configuration.

        None if code outside installed libraries may run: see [Note: what is kept].
        """
        if config is None or _names_code(config) or ":" in optimizer:
            return None
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        asked = replace(workload, model_config=text, device="cuda", inputs=(), deterministic=False)
        return EstimateRequest(workload=asked, optimizer=optimizer, allow=allow)

    def is_answered_by(self, profile: Profile) -> bool:
        """Whether an estimate answers this question."""
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
    """Cached estimates and fingerprints."""

    name = "estimates"
    libraries = ("torch", "transformers")
    optional = ("peft", "accelerate", "bitsandbytes", "numpy", "kernels")
    settings = ("TORCH", "PYTORCH", "TRANSFORMERS", "CUBLAS", "PEFT", "BNB")

    def fingerprint(self, question: EstimateRequest) -> str | None:
        """The fingerprint of the question's model; None if unknown."""
        found = self._read(_named(question, "fingerprint"))
        return found if found and re.fullmatch(r"sha256:[0-9a-f]{16,64}", found) else None

    def keep_fingerprint(self, question: EstimateRequest, fingerprint: str) -> None:
        """Cache `fingerprint`."""
        self._write(_named(question, "fingerprint"), fingerprint)

    def tally(self, question: EstimateRequest) -> Tally | None:
        """The estimate for every machine with a card; None if unknown."""
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
