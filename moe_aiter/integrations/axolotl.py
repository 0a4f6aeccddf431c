"""axolotl's plugin.  Its YAML file says `plugins: [moe_aiter.integrations.axolotl.Plugin]`."""

from .transformers import NAME, register

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError("moe_aiter.integrations.axolotl needs axolotl: pip install axolotl") from error

__all__ = ["Plugin"]


class Plugin(BasePlugin):
    """Run the experts of the model that axolotl loads on moe_aiter's kernels."""

    def pre_model_load(self, cfg) -> None:
        """Register the experts and choose them.

        Raises ValueError if the file or another plugin, axolotl's KernelsPlugin for example, chooses others.
        """
        if cfg.experts_implementation not in (None, NAME):
            raise ValueError(
                f"experts_implementation is {cfg.experts_implementation!r} but moe_aiter's plugin is on: "
                "remove the setting, or the plugin that sets it, or moe_aiter's plugin"
            )
        register()
        cfg.experts_implementation = NAME
