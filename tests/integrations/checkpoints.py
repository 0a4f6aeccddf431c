"""Checkpoints of tiny models, as transformers saves them, and single tensors of them changed."""

import json
import pathlib
from collections.abc import Callable

import torch
from integrations.families import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
# of some families, a layer without experts, or with several shared ones
CHANGES = {
    "qwen3_moe": {"mlp_only_layers": [0]}, "deepseek_v3": {"n_shared_experts": 2},
    "glm4_moe": {"n_shared_experts": 2, "n_group": 3, "topk_group": 2}, "qwen2_moe": {"norm_topk_prob": True},
    "qwen3_next": {"decoder_sparse_step": 2},
}  # fmt: skip


def save(folder: pathlib.Path, family: str, dtype=torch.float32, *, fused: bool = False, shard="20KB"):
    """The model, and its checkpoint in `folder`."""
    model = tiny_model(family, dtype, **CHANGES.get(family, {}))
    randomize_biases(model)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=not fused)
    return model


def randomize_biases(model) -> None:
    """The correction biases, which begin as zeros."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn_like(buffer))


def tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """All of a checkpoint, which must be whole and as its index says."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        for path in folder.glob("*.safetensors"):
            assert load_file(path).keys() == {k for k, v in index["weight_map"].items() if v == path.name}
    return found


def change(folder: pathlib.Path, edit: Callable[[dict], None]) -> None:
    """Save the checkpoint again, in one file, after `edit` of its tensors."""
    found = tensors(folder)
    edit(found)
    for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        path.unlink()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: pathlib.Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit, dtypes and shapes included."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )
