"""Time training steps of whole models of transformers, with each implementation of their experts.

    python -m benchmarks whole_model --out benchmarks/results/whole_model.csv
    python -m benchmarks whole_model --model OLMoE-1B-7B --training full lora+checkpointing --layers 8
    python -m benchmarks whole_model --contender moe_aiter grouped_mm batched_mm eager sonicmoe deepgemm hub

A model has the published widths, few layers, and random weights in bfloat16.  A step is a forward pass with
the loss, a backward pass, and an update by fused AdamW.  Contenders run one after another, in one process.
All start from the same weights and get the same batch: compare their first losses.  If a contender cannot
run, its row has the reason.
"""

import argparse
import gc
import pathlib
import time

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_aiter.bench.measure import WHERE, append, check_columns, count, provenance, quantiles, refuse
from moe_aiter.integrations import peft as adapters
from moe_aiter.integrations import transformers as integration

OURS, HUB = integration.NAME, "hub"  # the second: transformers' `set_use_kernels`, over grouped_mm
CONTENDERS = OURS, "grouped_mm", "batched_mm", "eager", "sonicmoe", "deepgemm", HUB
MODELS = {  # the configuration's class, and what the published checkpoint sets; other settings keep defaults
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "intermediate_size": 6144, "norm_topk_prob": True,
        },
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
            "sliding_window": 128,
        },
    ),
    "OLMoE-1B-7B": (
        "OlmoeConfig",
        {
            "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
        },
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2Config",
        {
            "hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400, "intermediate_size": 10944,
            "first_k_dense_replace": 0,  # 1 of 27 is dense; of few layers, one would be too many
        },
    ),
    "Gemma-4-26B-A4B": (
        "Gemma4TextConfig",
        {
            "hidden_size": 2816, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8,
            "enable_moe_block": True, "intermediate_size": 2112, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
            "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "vocab_size": 262144,
        },
    ),
}  # fmt: skip
WIDTHS = "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"  # that --divide divides
DEFAULT = {name: ["full"] for name in MODELS}  # what is trained, and how
for name in ("Qwen3-30B-A3B", "gpt-oss-20b"):
    DEFAULT[name] += ["full+checkpointing", "full+compile", "lora"]
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "o_proj"]}
LORA |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
LEARNING_RATE = 1e-4
TRIAL = "--device cpu --divide 8 --tokens 64"
LOSSES = 3
GIB = 2**30
FIELDS = [
    *WHERE,
    *("transformers", "model", "layers", "tokens", "sequence", "vocabulary", "parameters_m", "attention"),
    *("training", "contender", "steps", "step_ms", "p20", "p80", "host_ms", "tokens_per_s", "peak_gib"),
    *(f"loss_{i + 1}" for i in range(LOSSES)),
    "note",
]


def training(text: str) -> str:
    what, *how = text.split("+")
    if what not in ("full", "lora") or not set(how) <= {"checkpointing", "compile"}:
        raise argparse.ArgumentTypeError(f"{text} is not full or lora, with +checkpointing, +compile or both")
    return text


def config_of(name: str, args: argparse.Namespace):
    kind, sizes = MODELS[name]
    sizes = sizes | ({"vocab_size": args.vocabulary} if args.vocabulary else {})
    sizes = {key: n // args.divide if key in WIDTHS else n for key, n in sizes.items()}
    return getattr(transformers, kind)(**sizes, num_hidden_layers=args.layers, use_cache=False)


def attention_of(name: str, args: argparse.Namespace) -> str:
    """SDPA has no sinks, so gpt-oss uses flex_attention: eager attention would keep all scores in memory."""
    sinks = "flex_attention" if args.device == "cuda" else "eager"
    return args.attention or (sinks if name == "gpt-oss-20b" else "sdpa")


def build(name: str, how: str, contender: str, args: argparse.Namespace) -> nn.Module:
    """Return the model with the contender's experts, in training mode, on the device."""
    integration.register()
    torch.manual_seed(0)
    how_made = {
        "dtype": getattr(torch, args.dtype),
        "attn_implementation": attention_of(name, args),
        "experts_implementation": "grouped_mm" if contender == HUB else contender,
    }
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, args), **how_made)
    model.train()
    if contender == HUB:
        model.set_use_kernels(True)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "lora" in how:
        adapters.register()
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    if "compile" in how:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile()
    return model


def measure(name: str, how: str, contender: str, args: argparse.Namespace) -> dict:
    """Return the cells of a contender's row; times in ms, memory in GiB."""
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else int
    model = build(name, how, contender, args)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
    torch.manual_seed(1)
    batch = args.tokens // args.sequence, args.sequence
    tokens = torch.randint(model.config.vocab_size, batch, device=args.device)
    losses, steps, hosts = [], [], []
    for i in range(args.warmup + args.steps):
        if i == args.warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hosts.append(1e3 * (time.perf_counter() - start))
        wait()
        steps.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    step = quantiles(steps[args.warmup :])
    cells = {"step_ms": step.median, "p20": step.p20, "p80": step.p80}
    cells |= {"tokens_per_s": round(1e3 * args.tokens / step.median)}
    cells |= {f"loss_{i + 1}": f"{loss:.4f}" for i, loss in enumerate(losses[:LOSSES])}
    cells |= {"parameters_m": round(sum(p.numel() for p in model.parameters()) / 1e6)}
    if on_gpu:
        cells |= {"host_ms": quantiles(hosts[args.warmup :]).median}
        cells |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB}
    return cells


def row_of(name: str, how: str, contender: str, args: argparse.Namespace) -> dict:
    """Return the cells of `measure`, or the reason why there are none; print them."""
    gc.collect()
    if "compile" in how:
        torch.compiler.reset()  # or many models' layers, which share one method, reach a limit
    if args.device == "cuda":
        torch.cuda.empty_cache()
    start = time.perf_counter()
    try:
        cells = measure(name, how, contender, args)
    except Exception as error:
        first = str(error).strip().partition("\n")[0].partition(". ")[0]
        cells = {"note": f"{type(error).__name__}: {first.replace('|', '/')}"}
        text = cells["note"]
    else:
        text = f"{cells['tokens_per_s']:8} tokens/s, {cells['step_ms']:8.1f} ms"
        if args.device == "cuda":
            text += f", host {cells['host_ms']:.1f} ms, peak {cells['peak_gib']:.1f} GiB"
        text += f", losses {', '.join(v for k, v in cells.items() if k.startswith('loss_'))}"
    print(f"{contender:<12} {text} ({time.perf_counter() - start:.0f} s in all)", flush=True)
    return cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, default=list(MODELS), help="models [all]")
    add(
        "--training", nargs="+", type=training, metavar="HOW",
        help="full or lora, with +checkpointing and +compile (of each layer) "
        "[full; Qwen3 and gpt-oss: also full+checkpointing, full+compile and lora]",
    )  # fmt: skip
    add(
        "--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:2]),
        help="experts implementations; hub: grouped_mm with all kernels that transformers takes from the hub "
        "[moe_aiter grouped_mm]",
    )  # fmt: skip
    add("--layers", type=count, default=4, help="layers of each model [4]")
    add("--tokens", type=count, default=8192, help="tokens of a step [8192]")
    add("--sequence", type=count, default=4096, help="tokens of a sequence [4096]")
    add("--vocabulary", type=count, help="size of the vocabulary [the published one]")
    add("--attention", metavar="NAME", help="attention implementation [sdpa; gpt-oss: flex_attention]")
    add("--warmup", type=count, default=2, metavar="N", help="steps that are not timed [2]")
    add("--steps", type=count, default=5, metavar="N", help="timed steps [5]")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of weights [bfloat16]")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device [cuda]")
    add("--divide", type=count, default=1, metavar="N", help="divide all widths, to try the script [1]")
    add("--out", type=pathlib.Path, metavar="CSV", help="append the results to this file [none]")
    add("--commit", help="commit to record [the one that git reports]")
    parser.set_defaults(prog=parser.prog)


def main(args: argparse.Namespace) -> int:
    """Run all; 1 if one of our own contenders could not run."""
    if args.device == "cuda" and not torch.cuda.is_available():
        return refuse(args, f"there is no GPU that torch can use; for a trial: {TRIAL}")
    args.sequence, failed = min(args.sequence, args.tokens), False
    if args.tokens % args.sequence:
        return refuse(args, f"--tokens {args.tokens} must be a multiple of --sequence {args.sequence}")
    try:
        check_columns(args.out, FIELDS)
    except ValueError as mistake:
        return refuse(args, str(mistake))
    transformers.logging.set_verbosity_error()
    where = provenance(torch.device(args.device), args.dtype, args.commit)
    where |= {"transformers": transformers.__version__}
    print(", ".join(f"{k} {v}" for k, v in where.items()))
    for name in args.model:
        for how in args.training or DEFAULT[name]:
            print(f"\n{name}, {args.layers} layers, {args.tokens} tokens, {how}")
            sizes = {"layers": args.layers, "tokens": args.tokens, "sequence": args.sequence}
            sizes |= {"vocabulary": config_of(name, args).vocab_size, "attention": attention_of(name, args)}
            model = f"{name}, widths / {args.divide}" if args.divide > 1 else name
            about = where | {"model": model, "training": how, "steps": args.steps} | sizes
            for contender in args.contender:
                cells = row_of(name, how, contender, args)
                failed |= contender == OURS and "note" in cells
                if args.out:
                    append(args.out, [about | {"contender": contender} | cells], FIELDS)
    return int(failed)
