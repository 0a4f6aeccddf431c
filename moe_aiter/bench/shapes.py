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
    bias: bool = False
    activation: str = "swiglu"
    interleaved: bool = False  # gate and up rows in turn

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.num_tokens, self.hidden, self.intermediate, self.num_experts, self.top_k

    def __str__(self) -> str:
        return ", ".join(map(str, self.sizes))

    @property
    def plain(self) -> bool:
        """SwiGLU without biases, gate rows first: what everybody can do."""
        return (self.bias, self.activation, self.interleaved) == (False, "swiglu", False)

    @property
    def forward_flops(self) -> int:
        """Two for each multiplication of the three projections, whoever computes; a step has thrice that."""
        return 6 * self.num_tokens * self.top_k * self.hidden * self.intermediate


def per_token(hidden: int, intermediate: int, num_experts: int, top_k: int) -> dict[int, Shape]:
    """One layer with batches of 512 to 65536 tokens."""
    batches = [2**i for i in range(9, 17)]
    return {T: Shape(T, hidden, intermediate, num_experts, top_k) for T in batches}


# the layers of the SonicMoE paper, arXiv 2512.14080, that are not A or B
PAPER = {
    "1.4B-256": Shape(40960, 768, 256, 128, 8),
    "1.4B-512": Shape(40960, 768, 512, 64, 4),
    "1.4B-1024": Shape(40960, 768, 1024, 32, 2),
    "7B-512": Shape(24576, 1536, 512, 64, 4),
    "7B-1024": Shape(24576, 1536, 1024, 32, 2),
    "30B-256": Shape(32768, 4096, 256, 256, 16),
    "30B-512": Shape(32768, 4096, 512, 128, 8),
    "30B-1024": Shape(32768, 4096, 1024, 64, 4),
    "120B-512": Shape(32768, 4096, 512, 256, 16),
    "120B-2048": Shape(32768, 4096, 2048, 64, 4),
}
MODELS = {
    "gpt-oss": Shape(8192, 2880, 2880, 32, 4, bias=True, activation="swiglu_oai", interleaved=True),
    "gpt-oss-plain": Shape(8192, 2880, 2880, 32, 4),  # what biases and its activation cost
    "dsv3": Shape(16384, 7168, 2048, 256, 8),  # DeepSeek-V3
}
TOKENS = {f"C-{T}": shape for T, shape in per_token(2048, 768, 128, 8).items()}
SHAPES = {
    "A": Shape(32768, 4096, 1024, 128, 8),
    "B": Shape(24576, 1536, 256, 128, 8),
    "C": Shape(32768, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "D": Shape(16384, 4096, 14336, 8, 2),  # Mixtral 8x7B
    "E": Shape(4096, 2048, 1024, 64, 8),  # OLMoE, a small batch
    "cpu": Shape(4096, 512, 256, 64, 8),
    "toy": Shape(64, 32, 24, 5, 2),  # for tests
    "toy-oai": Shape(64, 32, 24, 5, 2, bias=True, activation="swiglu_oai", interleaved=True),
    **PAPER,
    **MODELS,
    **TOKENS,
}
DEFAULT = {"cuda": ["A", "B", "C", "D", "E"], "cpu": ["cpu"]}
GROUPS = {  # names that --shape takes for several
    "paper": list(PAPER),
    "models": list(MODELS),
    "tokens": list(TOKENS),  # for the plot of TFLOP/s against T
    "top-k": ["30B-1024", "30B-512", "30B-256"],  # for the plot of memory against k: as many FLOPs
}


def named(words: list[str]) -> list[str]:
    """The names of shapes, with those of a group in its place, and none twice."""
    return list(dict.fromkeys(name for word in words for name in GROUPS.get(word, [word])))


# of masked products, by device: groups, N and K (on a GPU those of AITER's test), and most rows of a group
MASKED = {"cuda": (16, 4096, 7168), "cpu": (4, 128, 224)}
MAX_M = (16, 64, 256, 1024)
