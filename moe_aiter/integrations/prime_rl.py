"""prime-rl's SwiGLU experts: the function that its fused kernel has, differentiable."""

from torch import Tensor

from ..kernels.base.check import check_axes, check_device, check_float, check_size, checked
from ..kernels.experts.split import split_expert_mlp
from ..layers.experts import local_part
from ..routing.plan import make_plan

__all__ = ["run_experts"]


@checked
def run_experts(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, expert_ids: Tensor, scores: Tensor, num_experts: int
) -> Tensor:
    """Return out[t] = sum over j of scores[t, j] * w2[e] @ (silu(w1[e] @ x[t]) * (w3[e] @ x[t])).

    e is expert_ids[t, j].  x: (T, H).  w1, w3: (E, I, H), w2: (E, H, I), any floating dtype, multiplied in
    that of x; of a DTensor, the part of this rank.  expert_ids: (T, k), int32 or int64, -1 drops the choice.
    scores: (T, k), any floating dtype, used in float32.  num_experts is E.  Returns (T, H) in the dtype of x.

    Differentiable in all floating inputs.  Raises ValueError for sizes or devices that
    disagree, and TypeError for dtypes.
    """
    w1, w2, w3 = map(local_part, (w1, w2, w3))
    choices = {"expert_ids": (expert_ids, "T, k"), "scores": (scores, "T, k")}
    check_axes(x=(x, "T, H"), w1=(w1, "E, I, H"), w2=(w2, "E, H, I"), w3=(w3, "E, I, H"), **choices)
    for name, t in {"x": x, "w1": w1, "w2": w2, "w3": w3, "scores": scores}.items():
        check_float(**{name: t})
    check_device(x=x, w1=w1, w2=w2, w3=w3, expert_ids=expert_ids, scores=scores)
    check_size("num_experts is {}", num_experts, "w1 is (E={}, I, H)", len(w1))
    return split_expert_mlp(x, w1, w3, w2, scores, make_plan(expert_ids, num_experts))
