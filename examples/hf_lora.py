"""Fine-tune the experts of a small Qwen3-MoE with LoRA: transformers' Trainer, PEFT, and our kernels.

    pip install '.[peft]'
    python examples/hf_lora.py
    python examples/hf_lora.py --rank 16 --steps 200 --out runs/lora

The model is built from a configuration, with random weights. `from_pretrained` takes the same argument
`experts_implementation`, and everything after that line stays the same.
"""

import argparse
import pathlib

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Trainer, TrainingArguments

from moe_aiter.integrations.peft import register
from moe_aiter.integrations.transformers import check

ROOT = pathlib.Path(__file__).parent.parent
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
SEQUENCE = 64


class Windows(torch.utils.data.Dataset):
    """Every window of `SEQUENCE` bytes of a text; the bytes are tokens and labels."""

    def __init__(self, text: bytes):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - SEQUENCE + 1

    def __getitem__(self, first: int) -> dict[str, Tensor]:
        tokens = self.text[first : first + SEQUENCE]
        return {"input_ids": tokens, "labels": tokens}


def base_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, output_router_logits=True)  # adds the load-balance loss
    return AutoModelForCausalLM.from_config(config, experts_implementation="moe_aiter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", type=int, default=8, help="[8]")
    parser.add_argument("--steps", type=int, default=100, help="[100]")
    parser.add_argument("--out", type=pathlib.Path, default="runs/lora", help="folder [runs/lora]")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")

    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    data = Windows(b"\n".join(f.read_bytes() for f in files))
    register()  # transformers knows "moe_aiter", and PEFT's adapters of experts run as low-rank products
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["lm_head"],  # because its weights are random here
    )
    model = get_peft_model(base_model(), lora)
    model.print_trainable_parameters()
    check(model)  # prints which kernels the experts run

    settings = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=max(1, args.steps // 5),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    Trainer(model, settings, train_dataset=data).train()

    model.save_pretrained(args.out)  # the adapter alone
    again = PeftModel.from_pretrained(base_model(), args.out).to(model.device)
    tokens = data[0]["input_ids"][None].to(model.device)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)
    print(f"saved the adapter to {args.out}")


if __name__ == "__main__":
    main()
