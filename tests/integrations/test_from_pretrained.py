"""Models with `MoE` layers of our own, which transformers makes on meta and loads tensor by tensor."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moe_aiter import MoE

H, E, K = 16, 6, 2


class Config(PretrainedConfig):
    model_type = "moe_of_ones_own"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.into = nn.Linear(H, H)
        self.moe = MoE(H, 8, E, K, selection_bias=True, quantile_bins=4, score="sigmoid")
        self.post_init()

    def forward(self, x):
        return self.moe(self.into(x))


class Resetting(Model):
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, MoE):
            module.reset_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Model, Resetting])
def test_counts_and_bias(kind, dtype, tmp_path, monkeypatch):
    """Counts begin at 0, and the bias is as it was saved, whatever the dtype and how weights are drawn."""
    model = kind(Config())
    model.moe.router.selection_bias += torch.arange(E) * 1e-3 + 4
    model.save_pretrained(tmp_path)
    empty_like = torch.empty_like

    def used_memory(t, **options):
        fresh = empty_like(t, **options)
        return fresh if fresh.is_meta else fresh.fill_(3)

    monkeypatch.setattr(torch, "empty_like", used_memory)
    loaded = kind.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.moe.load.count_nonzero() == loaded.moe.margins.count_nonzero() == 0
    assert torch.equal(loaded.moe.router.selection_bias, model.moe.router.selection_bias)
    assert loaded.moe.router.selection_bias.dtype == torch.float32
    for name, p in loaded.named_parameters():
        assert torch.equal(p, model.get_parameter(name).to(dtype)), name
    loaded.train()(torch.randn(5, H, dtype=dtype))
    assert loaded.moe.load.sum() == 5 * K


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_accelerate(include_buffers, dtype, tmp_path):
    """Counts begin at 0 on the device of the weights, and the bias is float32, wherever buffers are made."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = Model(Config())
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        loaded = Model(Config())
    loaded = accelerate.load_checkpoint_and_dispatch(loaded, tmp_path, {"": "cpu"}, dtype=dtype).train()
    assert loaded.moe.router.selection_bias.dtype == torch.float32
    assert loaded.moe.load.count_nonzero() == loaded.moe.margins.count_nonzero() == 0
    loaded(torch.randn(5, H, dtype=dtype))
    assert loaded.moe.load.sum() == 5 * K and loaded.moe.margins.device == loaded.moe.load.device
