"""Where prime-rl 0.8.0 (commit 559b4477) chooses the fused kernel, for `model.moe_fused_kernel = true`."""


def apply_fused_moe_kernel(model, quantization):
    raise ModuleNotFoundError("the kernel is in another package, prime-kernels")


def setup_model(model, config):
    """The last lines of the function that builds a model."""
    if config.moe_fused_kernel:
        apply_fused_moe_kernel(model, config.quantization)
    return model
