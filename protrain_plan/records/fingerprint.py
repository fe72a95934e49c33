"""What tells whether two records say the same."""

import hashlib

from protrain_plan.records.schema import Record
from protrain_plan.records.writer import canonical


def fingerprint(record: Record) -> str:
    """`sha256:` and 16 digits; equal for equal records, whatever the comments of their files."""
    digest = hashlib.sha256(canonical(record).encode()).hexdigest()
    return f"sha256:{digest[:16]}"
