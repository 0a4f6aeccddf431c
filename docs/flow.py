"""Draw docs/flow.png, the way of a token through `MoE`: `python docs/flow.py`."""

import pathlib

import matplotlib.pyplot as plt

STEPS = [  # what runs, and what it writes
    ("", "x   (T, H)"),
    ("router: scores, top k", "expert_ids, routing_weights   (T, k)"),
    ("sort by expert", "plan: order (R,), rank (T, k), group_sizes (E,)"),
    ("gather rows of x, multiply by gate_up", "z   (R, 2I)"),
    ("activation, in the same kernel", "a   (R, I)"),
    ("multiply by down, in column chunks", "y   (R, H)"),
    ("weighted sum of each token's rows", "out   (T, H)"),
]
KEPT = {"x", "expert_ids,", "plan:", "z"}  # by the first word
BOX = {"boxstyle": "round,pad=0.5", "linewidth": 1.2}

figure, axes = plt.subplots(figsize=(6, 6.2))
for row, (kernel, tensor) in enumerate(STEPS):
    kept = tensor.split()[0] in KEPT
    colors = {"facecolor": "#b2dfdb" if kept else "white", "edgecolor": "#00796b" if kept else "grey"}
    axes.text(0, -row, tensor, ha="center", va="center", fontsize=11, bbox=BOX | colors)
    if kernel:
        axes.annotate("", (0, -row + 0.25), (0, -row + 0.75), arrowprops={"arrowstyle": "->"})
        axes.text(0.04, -row + 0.5, kernel, va="center", fontsize=10, style="italic")
axes.text(0, -len(STEPS) + 0.4, "green: kept for backward", ha="center", va="center", color="#00796b")
axes.set(xlim=(-1, 1), ylim=(-len(STEPS) + 0.2, 0.4))
axes.set_axis_off()
figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=120, bbox_inches="tight")
