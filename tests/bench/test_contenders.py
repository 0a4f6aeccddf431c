"""Peers are called with what they ask for: stand-ins in plain torch say what that is."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from moe_aiter.bench import layer
from moe_aiter.bench.problem import SHAPES, Problem, chosen_weights, for_loop, new_problem

from .judge import check


def stand_in(monkeypatch, **modules):
    """Modules by name, with __ for a dot, that hold what is given."""
    for name, content in modules.items():
        parts = name.split("__")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(".".join(parts))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)


def looped(x, gate_up, down, ids, weights):
    """The plain loop over a layout of ours."""
    E, width, H = down.shape[0], down.shape[2], x.shape[1]
    shape = type(SHAPES["toy"])(x.shape[0], H, width, E, ids.shape[1])
    return for_loop(Problem(shape, x, None, None, gate_up, down, (), ids, weights))


def liger(monkeypatch):
    class Function:
        @staticmethod
        def apply(x, gate_up, down, ids, weights):
            assert ids.dtype == torch.int32 and weights.dtype == x.dtype
            return looped(x, gate_up, down, ids, weights)

    stand_in(
        monkeypatch,
        liger_kernel__ops__fused_moe={"LigerFusedMoEFunction": Function},
        liger_kernel__ops__fused_moe_kernels={"_AUTOTUNE_DISABLED": True},
    )
    return layer.liger


def megablocks(monkeypatch):
    class Layer:
        def __init__(self, arguments):
            self.arguments, self.mlp = arguments, types.SimpleNamespace()
            assert arguments.device.type == "meta" and arguments.bf16 and not arguments.fp16

        def forward_once(self, x, weights, ids):
            a, mlp = self.arguments, self.mlp
            w1, v1, w2 = (
                w.view(a.moe_num_experts, a.ffn_hidden_size, a.hidden_size) for w in (mlp.w1, mlp.v1, mlp.w2)
            )
            assert a.activation_fn is F.silu and all(w.is_contiguous() for w in (w1, v1, w2))
            return looped(x, torch.cat([w1, v1], 1), w2.mT, ids, weights), None

    arguments = {"Arguments": types.SimpleNamespace}
    dmoe = {"ParallelDroplessMLP": Layer}
    stand_in(monkeypatch, megablocks__layers__arguments=arguments, megablocks__layers__dmoe=dmoe)
    return layer.megablocks


def sonicmoe(monkeypatch):
    class Router:
        @staticmethod
        def apply(logits, E, k, softmax_over_chosen=True, renormalize=False):
            assert softmax_over_chosen and not renormalize
            scores, ids = logits.float().topk(k)
            return scores.softmax(-1), ids.int()

    def moe(x, router, w1, b1, w2, b2, k, stream, activation, inference):
        assert (b1, b2, stream, activation) == (None, None, 7, "swiglu")
        assert inference != torch.is_grad_enabled()
        ids = Router.apply(F.linear(x, router), router.shape[0], k)[1].long()
        weights = chosen_weights(x, router, ids, torch.float32)
        w1 = w1.permute(2, 0, 1)
        gate_up = torch.cat([w1[:, ::2], w1[:, 1::2]], 1)
        return looped(x, gate_up, w2.permute(2, 0, 1), ids, weights), None, None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    swiglu = types.SimpleNamespace(SWIGLU="swiglu")
    functional = {"TC_Softmax_Topk_Router_Function": Router, "moe_TC_softmax_topk_layer": moe}
    stand_in(
        monkeypatch,
        sonicmoe={"__version__": "0.1.2"},
        cutlass__base_dsl__common={"DSLBaseError": type("DSLBaseError", (Exception,), {})},
        sonicmoe__enums={"ActivationType": swiglu},
        sonicmoe__functional=functional,
    )
    return layer.sonicmoe


def scattermoe(monkeypatch):
    class MLP:
        def __init__(self, hidden, width, E, k):
            self.experts, self.output_experts = types.SimpleNamespace(), types.SimpleNamespace()

        def __call__(self, x, weights, ids):
            up, gate = self.experts.weight.chunk(2, 1)
            return looped(x, torch.cat([gate, up], 1), self.output_experts.weight, ids, weights)

    stand_in(monkeypatch, scattermoe__mlp={"GLUMLP": MLP})
    return layer.scattermoe


@pytest.mark.parametrize("peer", [liger, megablocks, sonicmoe, scattermoe])
def test_layouts(peer, monkeypatch):
    p = new_problem(SHAPES["toy"], torch.bfloat16, torch.device("cpu"))
    contender = peer(monkeypatch)(p)
    row = check([contender], p)[0]
    assert not row["refused"], row
    p.renew(1)  # in place: they see new inputs
    assert not check([contender], p)[0]["refused"]
    with torch.no_grad():
        assert contender.run().shape == p.x.shape


def test_a_name_says_what_was_not_tuned(monkeypatch):
    p = new_problem(SHAPES["toy"], torch.bfloat16, torch.device("cpu"))
    assert liger(monkeypatch)(p).name == "Liger, not tuned"


def test_an_error_of_its_own_kind_leaves_a_peer_out(monkeypatch, capsys):
    p = new_problem(SHAPES["toy"], torch.bfloat16, torch.device("cpu"))
    contender = sonicmoe(monkeypatch)(p)

    def run():
        raise contender.errors[0]("no such GPU")

    contender.run = run
    assert check([contender], p) == [{"refused": True, "note": "DSLBaseError: no such GPU"}]
    assert "layer: SonicMoE 0.1.2 cannot run here: DSLBaseError: no such GPU" in capsys.readouterr().out


@pytest.mark.parametrize("build", ["liger", "megablocks", "sonicmoe", "scattermoe"])
def test_a_missing_peer_says_so(build, monkeypatch):
    for name in ("liger_kernel", "megablocks", "cutlass", "sonicmoe", "scattermoe"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        getattr(layer, build)(new_problem(SHAPES["toy"], torch.bfloat16, torch.device("cpu")))
