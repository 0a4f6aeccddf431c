"""The shapes that are measured: what models have, with a batch that fills the device."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens, each of which goes to `top_k` of E experts of width I."""

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return ", ".join(map(str, dataclasses.astuple(self)))

    @property
    def forward_flops(self) -> int:
        """Two for each multiplication of the three projections, whoever computes; a step has thrice that."""
        return 6 * self.num_tokens * self.top_k * self.hidden * self.intermediate


SHAPES = {
    "A": Shape(32768, 4096, 1024, 128, 8),
    "B": Shape(24576, 1536, 256, 128, 8),
    "C": Shape(32768, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "D": Shape(16384, 4096, 14336, 8, 2),  # Mixtral 8x7B
    "E": Shape(4096, 2048, 1024, 64, 8),  # OLMoE, a small batch
    "cpu": Shape(4096, 512, 256, 64, 8),
    "toy": Shape(64, 32, 24, 5, 2),  # for tests
}
DEFAULT = {"cuda": ["A", "B", "C", "D", "E"], "cpu": ["cpu"]}
