"""Train a small transformer with MoE layers on text, byte by byte, in plain PyTorch.

python examples/train_from_scratch.py
python examples/train_from_scratch.py --steps 400 --resume runs/from_scratch/200.pt
"""

import argparse
import pathlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_aiter import MoE, Monitor

ROOT = pathlib.Path(__file__).parent.parent
HIDDEN, HEADS, LAYERS, SEQUENCE, BATCH = 64, 2, 2, 64, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        # In place of a dense MLP. Backward adds the gradient of the load-balance loss.
        self.mlp = MoE(HIDDEN, intermediate=128, num_experts=8, top_k=2, load_balance_coef=0.01)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, hidden)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, sequence, hidden / heads) each
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, sequence) -> (batch, sequence, 256)
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))


def batch_of(text: Tensor, step: int) -> Tensor:
    """Return the batch of a step, (batch, sequence + 1). A resumed run draws the same batches."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=generator)
    return text[first + torch.arange(SEQUENCE + 1)].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="last step [200]")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints and reports [50]")
    parser.add_argument(
        "--out", type=pathlib.Path, default="runs/from_scratch", help="folder [runs/from_scratch]"
    )
    parser.add_argument("--resume", type=pathlib.Path, help="checkpoint to continue from")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]

    args.out.mkdir(parents=True, exist_ok=True)
    with Monitor(model) as monitor:
        for step in range(done + 1, args.steps + 1):
            batch = batch_of(text, step).to(device)
            # On a GPU, matrix products run in bfloat16. Parameters stay float32.
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % args.every == 0 or step == args.steps:
                print(f"step {step}: loss {loss.item():.4f}")
                for name, layer in monitor.read().items():
                    print(f"  {name}: load {layer.load.round(2)}, {layer.dead_experts} dead experts")
                monitor.reset()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, args.out / f"{step}.pt")


if __name__ == "__main__":
    main()
