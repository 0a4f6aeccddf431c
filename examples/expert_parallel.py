"""Train the model of train_from_scratch.py on several GPUs, or on several processes of a CPU.

torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py --ep 2

The experts of each layer are shared among `--ep` ranks (expert parallelism), and FSDP2 shards all parameters.
docs/tutorial_expert_parallel.md explains each step, and several hosts.
The checkpoint is in OUT/STEPS; `--resume STEP` continues from OUT/STEP, also on another number of ranks.
"""

import argparse
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from train_from_scratch import BATCH, ROOT, LanguageModel, batch_of

from moe_aiter.distributed import (
    clip_grad_norm_,
    expert_mesh,
    export_safetensors,
    load_sharded,
    parallelize,
    parameter_groups,
    save_sharded,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="last step [200]")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of a layer [1]")
    parser.add_argument("--out", type=pathlib.Path, default="runs/expert_parallel", help="folder")
    parser.add_argument("--resume", type=int, default=0, metavar="STEP", help="step to continue from")
    args = parser.parse_args()

    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start this file with torchrun, as its first lines say")
    if (args.out / str(args.steps)).exists():
        raise SystemExit(f"{args.out / str(args.steps)} exists: choose another --out or --steps")
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world, device = dist.get_rank(), dist.get_world_size(), "cuda" if gpu else "cpu"
    if BATCH % world:
        raise SystemExit(f"{world} ranks cannot divide a batch of {BATCH}")

    torch.manual_seed(0)  # all ranks begin with the same weights
    model = parallelize(LanguageModel().to(device), expert_mesh(device, args.ep))
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=3e-3)
    if args.resume:
        load_sharded(args.out / str(args.resume), model, optimizer)
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    for step in range(args.resume, args.steps):
        batch = batch_of(text, step).chunk(world)[rank].to(device)  # this rank's part of one batch
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            dist.all_reduce(loss.detach())  # the sum over the ranks
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item() / world:.4f}")
    save_sharded(args.out / str(args.steps), model, optimizer)
    export_safetensors(args.out / "model.safetensors", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process while Python's interpreter ends
