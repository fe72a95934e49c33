"""All adapters by name."""

from benchmarks.peers.budgeted import BUDGETED
from benchmarks.peers.checkpointed import CHECKPOINT_OFFLOADED, CHECKPOINTED
from benchmarks.peers.deepspeed_zero import DEEPSPEED
from benchmarks.peers.fsdp2 import FSDP2
from benchmarks.peers.plain import PLAIN
from benchmarks.peers.planned import PLANNED
from benchmarks.peers.saved_on_cpu import SAVED_ON_CPU
from benchmarks.peers.torchao_offload import TORCHAO_OFFLOAD
from benchmarks.peers.work import Adapter

# Those that compile come last: they take longest to start.
PEERS = (
    PLAIN,
    CHECKPOINTED,
    CHECKPOINT_OFFLOADED,
    SAVED_ON_CPU,
    FSDP2,
    TORCHAO_OFFLOAD,
    *DEEPSPEED,
    *BUDGETED,
)
ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in (PLANNED, *PEERS)}
