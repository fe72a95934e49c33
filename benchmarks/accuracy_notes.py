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
    " estimates take upper bounds, fitted to a machine with AVX-512 and two threads.",
    "Whisper is estimated up to 11.6 KB too low: 12,864 bytes are missing in the forward of"
    " model.encoder.layer_norm. Not understood.",
    "gpt2-checkpointed was estimated with the model's own gradient checkpointing on. Estimates"
    " switch it off since (tests/test_estimated.py); it was not run again.",
)
