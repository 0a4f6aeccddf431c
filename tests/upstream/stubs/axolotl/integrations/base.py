"""The plugins of axolotl 0.19.0, as the loader of its models calls them."""

import importlib


class BasePlugin:
    def register(self, cfg: dict):
        pass

    def pre_model_load(self, cfg):
        pass


class PluginManager:
    _instance = None

    def __init__(self):
        self.plugins = {}

    @staticmethod
    def get_instance() -> "PluginManager":
        PluginManager._instance = PluginManager._instance or PluginManager()
        return PluginManager._instance

    def register(self, plugin_name: str):
        module_name, class_name = plugin_name.rsplit(".", 1)
        self.plugins[plugin_name] = getattr(importlib.import_module(module_name), class_name)()

    def pre_model_load(self, cfg):
        for plugin in self.plugins.values():
            plugin.pre_model_load(cfg)
