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
    "LLaVA is over-predicted by 4 to 6 %, where states are persistent: its last image layer gets no"
    " gradients, so that AdamW makes no states for it, and a profile counts both. That is"
    " inferred: twice that layer's parameters are the bytes that are over, to 7 KiB.",
    "In bfloat16 products and in convolutions oneDNN chooses its scratch memory by the processor:"
    " estimates take upper bounds, up to 1.2 MiB (llama) and 2.6 MiB (convolutional) in a slot.",
    "*Besides tensors* was up to 4.5 MiB (1 %) more than profiled in plans with transfers. Not"
    " understood. These processes, profile and run, are forks of one that has imported everything;"
    " for llama under offload in processes started afresh, 385 MiB came of 387 MiB profiled.",
    "ViT and LLaVA are not estimated: their code asks for values of tensors. Bytes of their planned"
    " steps are predicted from measured profiles.",
)
