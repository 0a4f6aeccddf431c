"""Fine-tune a small Qwen3-MoE on text, byte by byte, with the implementation of its experts that you choose.

    pip install '.[hf]'
    python examples/hf_finetune.py --experts moe_aiter
    python examples/hf_finetune.py --experts grouped_mm --text my_text.txt

The model is built from a configuration, with random weights; `from_pretrained` takes the same argument.
"""

import argparse
import pathlib
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_aiter.integrations.transformers import register

ROOT = pathlib.Path(__file__).parent.parent
SIZES = {  # on a CPU, on a GPU
    "hidden": (128, 2048), "intermediate": (64, 768), "num-experts": (16, 128), "top-k": (4, 8),
    "layers": (2, 2), "sequence": (128, 2048), "batch": (8, 16), "steps": (60, 100),
}  # fmt: skip
WARM_UP = 10  # steps that are not timed: kernels are compiled in them


def arguments(gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experts", default="moe_aiter", choices=["moe_aiter", "grouped_mm", "eager"])
    parser.add_argument("--text", type=pathlib.Path, nargs="+", help="files; the documents here unless given")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default 0.001")
    for name, defaults in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=defaults[gpu], help=f"default {defaults[gpu]}")
    args = parser.parse_args()
    if missing := [str(f) for f in args.text or () if not f.is_file()]:
        parser.error(f"no file {', '.join(missing)}")
    if args.steps < 1 or not 1 <= args.top_k <= args.num_experts:
        parser.error("there must be at least one step, and from 1 to num-experts experts for each token")
    return args


def build(args: argparse.Namespace, device: str) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.num_experts,
        num_experts_per_tok=args.top_k,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=64,
        norm_topk_prob=True,
        output_router_logits=True,  # adds the load-balance loss
    )
    register()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=args.experts)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = arguments(device == "cuda")
    files = args.text or sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    if len(text) <= args.sequence:
        raise SystemExit(f"the text has {len(text)} bytes, but a sequence needs {args.sequence + 1}")
    torch.manual_seed(0)
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes, on {device}")

    window = torch.arange(args.sequence)
    start = None
    for step in range(args.steps):
        first = torch.randint(len(text) - args.sequence + 1, (args.batch, 1))
        tokens = text[first + window].long().to(device)  # (batch, sequence)
        out = model(tokens, labels=tokens)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == min(WARM_UP, args.steps - 1) or (step + 1) % 10 == 0 or step + 1 == args.steps:
            loss = out.loss.item()  # waits for the device
            if start is None:
                start, done, speed = time.perf_counter(), step + 1, ""
            else:
                speed = f", {(step + 1 - done) / (time.perf_counter() - start):.2f} steps/s"
            print(f"step {step + 1}: loss {loss:.3f}{speed}", flush=True)


if __name__ == "__main__":
    main()
