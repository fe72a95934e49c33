"""A model that is larger than the memory to train it in: from its files into a plan, and back.

SmolLM2-360M has 1,380 MiB of parameters in float32, and training has 1,300 MiB: an allocation above
that fails (RLIMIT_DATA). A process without the limit writes the model to a folder, as it would be
downloaded. Under the limit values go from there to where the plan has them, and after training to
a checkpoint, which transformers reads. Plain PyTorch, without a limit, has to end with equal bits.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from demo import must, protrain, say, size  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM


def write(folder: Path) -> None:
    """Write the model, with random values, in files of 256 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="256MB")


def compare(model: Path, saved: Path, plain: Path) -> bool:
    """Whether transformers reads equal bits from both checkpoints."""
    read = []
    for folder in (saved, plain):
        shutil.copy(model / "config.json", folder)
        read.append(LlamaForCausalLM.from_pretrained(folder).state_dict())
    first, second = read
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return equal and first.keys() == second.keys()


def main() -> int:
    """Run the demo; 0 if everything that it promises held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", default="1300MiB")
    parser.add_argument("--steps", default="2")
    parser.add_argument("--out", type=Path, default=Path("large-model"))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write)
        return 0
    out: Path = options.out
    model, saved, plain = (out / name for name in ("model", "trained", "plain"))
    out.mkdir(exist_ok=True)
    profile, plan = str(out / "profile.yaml"), str(out / "plan.yaml")

    subprocess.run([sys.executable, __file__, "--write", str(model)], check=True)
    files = sorted(model.glob("*.safetensors"))
    say(f"{len(files)} files of {size(sum(file.stat().st_size for file in files))} in {model}")
    must(protrain("profile", str(model), "--seq-len", "64", "--steps", "1", "-o", profile))
    limit, steps = ("--memory-limit", options.limit), ("--steps", options.steps)
    must(protrain("plan", profile, "--device-memory", options.limit, "--clip", "-o", plan))
    run = ("run", plan, "--weights", str(model), *steps)
    refused = protrain(*run, "--plain", *limit)
    say(refused.error or "it ran")
    planned = must(protrain(*run, *limit, "--save", str(saved)))
    reference = must(protrain(*run, "--plain", "--save", str(plain)))

    promised, found = planned["predicted_peak_bytes"], planned["measured_peak_bytes"]
    for what, tiers in (("memory", ("device", "context")), ("disk", ("disk",))):
        say(
            f"{what}: {size(sum(promised[tier] for tier in tiers))} predicted,"
            f" {size(sum(found[tier] for tier in tiers))} measured"
        )
    same = all(planned[key] == reference[key] for key in ("losses", "parameters_sha256"))
    say(f"losses {planned['losses']}: {'equal bits' if same else 'DIFFERENT'}")
    read = compare(model, saved, plain)
    say(f"transformers reads {'equal bits' if read else 'DIFFERENT ones'} from both checkpoints")
    within = all(found[tier] <= promised[tier] for tier in ("device", "context", "disk"))
    held = refused.code == 4 and same and read and within
    say("everything held" if held else "not everything held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
