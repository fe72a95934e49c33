"""Small configurations of published architectures."""

SMALL: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
                         "vocab_size": 300}  # fmt: skip


CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 6},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 2},
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 32,
               "num_hidden_layers": 8, "sliding_window": 16},
    "t5": {"model_type": "t5", "num_layers": 5, "d_model": 64, "d_ff": 96, "num_heads": 2,
           "d_kv": 32, "decoder_start_token_id": 0},
    "bert": {"model_type": "bert", "num_hidden_layers": 2},
    "mixtral": {"model_type": "mixtral", "num_hidden_layers": 2, "num_key_value_heads": 1,
                "num_local_experts": 4},
}  # fmt: skip
