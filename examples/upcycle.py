"""Upcycle a dense model: replace its MLPs by MoE layers that compute the same function, and train on.

    pip install '.[hf]'
    python examples/upcycle.py
    python examples/upcycle.py --experts 16 --top-k 4 --out runs/upcycled

Each expert starts as a copy of the dense MLP, and the routing weights of a token sum to 1. So the outputs
stay the same (Komatsuzaki et al. 2022, arXiv 2212.05055). The dense model here is a small Qwen3, which the
script first trains for some steps. `upcycle` accepts the folder of any Llama, Mistral or Qwen3 checkpoint.
"""

import argparse
import pathlib
import tempfile

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from moe_aiter.integrations.checkpoints import CheckpointError, upcycle
from moe_aiter.integrations.transformers import register

ROOT = pathlib.Path(__file__).parent.parent
DENSE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
SEQUENCE, BATCH = 64, 16


def batch_of(text: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=generator)
    return text[first + torch.arange(SEQUENCE)].long()  # (batch, sequence)


def train(model: PreTrainedModel, text: Tensor, steps: int, seed: int) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = batch_of(text, seed + step).to(model.device)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def logits_and_loss(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, float]:
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps before, and after [100]")
    parser.add_argument("--experts", type=int, default=8, help="[8]")
    parser.add_argument("--top-k", type=int, default=2, help="experts for each token [2]")
    parser.add_argument("--noise", type=float, default=0.0, help="makes the copies different [0]")
    parser.add_argument("--out", type=pathlib.Path, help="folder for both checkpoints [a temporary one]")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    sample = batch_of(text, seed=0).to(device)  # not a batch of the training
    register()  # from now on, transformers knows experts_implementation="moe_aiter"
    torch.manual_seed(0)

    dense = AutoModelForCausalLM.from_config(Qwen3Config(**DENSE)).to(device)
    train(dense, text, args.steps, seed=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or pathlib.Path(temporary)
        dense.save_pretrained(folder / "dense")
        options = {"to": "huggingface", "noise": args.noise}
        try:
            upcycle(folder / "dense", folder / "moe", args.experts, args.top_k, **options)
        except CheckpointError as error:
            parser.error(str(error))
        moe = AutoModelForCausalLM.from_pretrained(folder / "moe", experts_implementation="moe_aiter")
    moe.to(device).config.output_router_logits = True  # adds the load-balance loss to the training loss

    expected, loss = logits_and_loss(dense, sample)
    print(f"dense: {dense.num_parameters():,} parameters, loss {loss:.4f}")
    logits, loss = logits_and_loss(moe, sample)
    print(f"MoE: {moe.num_parameters():,} parameters, loss {loss:.4f}")
    print(f"largest difference of the logits: {(logits - expected).abs().max():.1e}")
    train(moe, text, args.steps, seed=1 + args.steps)
    print(f"MoE after {args.steps} more steps: loss {logits_and_loss(moe, sample)[1]:.4f}")


if __name__ == "__main__":
    main()
