"""Why predicted and measured figures differ where they do: what was looked into."""

NOTES = (
    "Predictions stand up to 2 KiB above measured peaks: two scalars per parameter and 256 bytes"
    " are set aside for the optimizer's clones and for losses, of which a step uses a part.",
    "In partial forms an estimated forward peak has 8 bytes more: a Python number becomes a tensor"
    " twice under a dispatch mode, and not every peak is at such an operator.",
    "Parts between blocks take the larger of their costs over all forms of the blocks. In T5 that"
    " is up to 0.4 MiB in a slot: position biases end with the forward, or with a backward.",
    "What an expert gets depends on the tokens. An estimate takes routing as even; measured bytes"
    " are those of the profiled batch and of the step that ran.",
    "In bfloat16 products and in convolutions oneDNN chooses its scratch memory by the processor:"
    " estimates take upper bounds, fitted to a machine with AVX-512 and two threads. Where a peak"
    " lies in a convolution, as whisper's does under the planner's plan, an estimate is more over.",
    "Of models with gradient checkpointing of their own, plain steps run without it too: a plan"
    " decides which blocks are recomputed, and its slowdown is over keeping everything.",
)
