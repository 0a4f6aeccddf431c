"""The arguments of LLaMA-Factory 0.9.6, as its YAML file gives them."""

from types import SimpleNamespace


def get_train_args(args: dict) -> tuple:
    """Those of the model, the data, the training, the finetuning and the generation."""
    return tuple(SimpleNamespace(**args) for _ in range(5))
