"""Importing this module registers our experts with transformers and makes them the default:

    import moe_aiter.integrations.auto

It is for trainers that load the model themselves and can import a module by its name.  transformers' default
is "grouped_mm".  After this import, the default is "moe_aiter".  If `experts_implementation=`, config.json or
an option of the trainer names an implementation, the model gets that one.  Models whose experts lack
transformers' decorator, and FP8 checkpoints, keep transformers' default.
"""

from functools import wraps

from .transformers import NAME, interface, register

__all__ = []


def make_default() -> None:
    register()  # before transformers is imported: its error says what to install
    from transformers import PreTrainedModel as model

    model.get_correct_experts_implementation = ours_by_default(model.get_correct_experts_implementation)


def ours_by_default(method):
    """Wrap the method of `PreTrainedModel` that completes the choice of an implementation: None has none."""

    @wraps(method)
    def run(self, requested_experts):
        can_run = NAME in interface()._global_mapping and self._can_set_experts_implementation()
        if requested_experts is None and can_run and not is_fp8(self.config):
            requested_experts = NAME
        return method(self, requested_experts)

    return run


def is_fp8(config) -> bool:
    """Whether transformers looks up the implementation in its registry for FP8, which has other names."""
    given = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return method == "fp8"


make_default()
