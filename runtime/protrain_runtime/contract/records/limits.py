"""Kinds of numbers and texts in records, each with its limits: what stands beside a field.

With these no sum, product or quotient overflows, and no input takes long. A number is besides 0, or
at least `SMALLEST` away from it.
"""

from typing import Annotated, Final

from msgspec import Meta

from protrain_runtime.contract.units import MAX_BYTES

SMALLEST: Final = 1e-12
MAX_TEXT: Final = 1_000
"""Characters of a text, of which nothing else is said, and of a key."""
MAX_LIST: Final = 1_000
"""Entries of a list of which nothing else is said."""
MAX_UNITS: Final = 1_000
"""Units of a model, runs unfolded: as many as a command looks at in seconds."""
MAX_UNFOLDED: Final = 500_000
"""Keys and values of all units, those of a run counted for each of its units."""
MAX_COUNT: Final = 100_000
"""Devices, threads: what there can be of things."""

IS_SIZE: Final = {"is": "size"}
"""Numbers of bytes: a file has a number, or a text such as `1.5GiB`."""
IS_LINES: Final = {"is": "lines"}
"""A text that may have several lines."""

Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES, extra=IS_SIZE)]
BytesBeyond = Annotated[int, Meta(ge=-MAX_BYTES, le=MAX_BYTES, extra=IS_SIZE)]
"""Relative to a level: may be far below it."""
SomeBytes = Annotated[int, Meta(ge=1, le=MAX_BYTES, extra=IS_SIZE)]
Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Many = Annotated[int, Meta(ge=1, le=10**9)]
Index = Annotated[int, Meta(ge=0, le=MAX_UNITS - 1)]
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_UNITS)]
Position = Annotated[int, Meta(ge=0, le=MAX_LIST)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
StepSeconds = Annotated[float, Meta(ge=1e-12, le=1e9)]
OtherStepSeconds = Annotated[float, Meta(ge=0, le=1e9)]
"""0: there is no such step."""
Slots = Annotated[float, Meta(ge=0, le=2.0 * MAX_UNITS)]
Speed = Annotated[float, Meta(ge=1, le=1e21)]
SpeedIfKnown = Annotated[float, Meta(ge=0, le=1e21)]
Share = Annotated[float, Meta(ge=1e-6, le=1)]
ShareIfKnown = Annotated[float, Meta(ge=0, le=1)]
Half = Annotated[float, Meta(ge=0.5, le=1)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]
Gain = Annotated[float, Meta(ge=0, le=100, description="a part such as 0.1")]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MicroBatches = Annotated[int, Meta(ge=1, le=10**6)]
Price = Annotated[float, Meta(ge=0, le=1e6, description="a price for an hour")]

IS_JSON: Final = {"is": "JSON"}
"""A JSON object as text, or nothing."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
LongText = Annotated[str, Meta(max_length=10_000)]
Lines = Annotated[str, Meta(max_length=10_000, extra=IS_LINES)]
JsonText = Annotated[
    str,
    Meta(
        max_length=1_000_000,
        extra=IS_JSON,
        extra_json_schema={"pattern": r"^(\s*\{[\s\S]*\}\s*)?$"},
    ),
]
Names = Annotated[tuple[Text, ...], Meta(max_length=100_000)]
Tensors = Annotated[tuple[LongText, ...], Meta(max_length=100_000)]
