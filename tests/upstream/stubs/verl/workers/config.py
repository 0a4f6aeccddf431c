"""The model's configuration in verl 0.9.1: `actor_rollout_ref.model` of its command line."""

import importlib
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig


@dataclass
class HFModelConfig:
    path: str
    external_lib: Any = None
    override_config: dict = field(default_factory=dict)
    hf_config: Any = None

    def __post_init__(self):
        libraries = self.external_lib if isinstance(self.external_lib, list) else [self.external_lib]
        for library in libraries:
            importlib.import_module(library)
        attention = self.override_config.get("attn_implementation", "flash_attention_2")
        self.hf_config = AutoConfig.from_pretrained(self.path, attn_implementation=attention)
        for key, val in self.override_config.items():
            setattr(self.hf_config, key, val)
