"""Engine and trainer give a token the same log-probability, bit for bit, in models of transformers.

The engine infers: whole sequences in batches of any size, or token by token with a cache of keys and values.
The trainer has one batch of 64 sequences, padded or packed, with or without activation checkpointing.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from rl_same_bits import Policy, attention

from moe_aiter import patch_linear
from moe_aiter.config import interpret
from moe_aiter.integrations.transformers import NAME, register, unregister
from moe_aiter.invariance import invariant

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

LENGTH, SHORT, SEQUENCES, VOCABULARY = 64, 12, 64, 96
SIZES = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
SIZES |= {"eos_token_id": None}
WIDTH = {"qwen3_moe": "moe_intermediate_size", "olmoe": "intermediate_size"}
DTYPES = torch.float32, torch.bfloat16
BATCHES = 1, 17, 64
CPU = torch.device("cpu")
kinds = pytest.mark.parametrize("kind", WIDTH)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def attend(module, q, k, v, mask, cu_seq_lens_q=None, **_):
    """The attention of the example, as transformers calls it; a packed sequence attends to itself."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    if cu_seq_lens_q is None:
        return attention(q, k, v, LENGTH).transpose(1, 2), None
    lengths = cu_seq_lens_q.diff().tolist()
    sequences = zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    return torch.cat([attention(*qkv, LENGTH) for qkv in sequences], 2).transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered():
    register()
    AttentionInterface.register("by_products", attend)
    yield
    unregister()


def model_of(kind, device, dtype=torch.float32, kernel="by_products"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **{WIDTH[kind]: 32})
    options = {"experts_implementation": NAME, "attn_implementation": kernel, "dtype": dtype}
    model = AutoModelForCausalLM.from_config(config, **options)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    for module in model.modules():
        if device.type == "cuda" and type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module)
    return model.to(device), torch.randint(VOCABULARY, (SEQUENCES, LENGTH), device=device)


def norm(module, x):
    """In transformers it is a mean, and a mean on a GPU takes threads for a row by the number of rows."""
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def log_probabilities(model, tokens, **options):
    """Log p of each token after the first, (B, S - 1)."""
    logits = model(tokens, use_cache=False, **options).logits
    return of_tokens(logits[:, :-1], tokens)


def of_tokens(logits, tokens):
    return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def infer(model, tokens):
    return log_probabilities(model.eval(), tokens)


@torch.no_grad()
def decode(model, tokens):
    """As `infer`, but one token of each sequence at a time."""
    model.eval()
    logits, cache = [], None
    for token in tokens[:, :-1].split(1, 1):
        out = model(token, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        cache = out.past_key_values
    return of_tokens(torch.cat(logits, 1), tokens)


def test_attention_refuses_more_keys_than_it_pads_to():
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    assert attention(q, k, v, 8).shape == q.shape
    with pytest.raises(AssertionError):
        attention(q, k, v, 7)


@dtypes
@kinds
def test_engine(kind, dtype, device):
    model, tokens = model_of(kind, device, dtype)
    with invariant(), patch_linear():
        trained = log_probabilities(model.train(), tokens).detach()
        for sequences in BATCHES:
            some = torch.randperm(SEQUENCES)[:sequences]
            assert torch.equal(infer(model, tokens[some]), trained[some]), sequences
            short = tokens[some, :SHORT]
            assert torch.equal(infer(model, short), trained[some, : SHORT - 1]), sequences
            assert torch.equal(decode(model, short), trained[some, : SHORT - 1]), sequences


@dtypes
def test_packed(dtype, device):
    """The engine's sequences have padding, the trainer's have none."""
    model, tokens = model_of("qwen3_moe", device, dtype)
    lengths = torch.randint(2, LENGTH + 1, (SEQUENCES,))
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(device)
    packed = torch.cat([row[:n] for row, n in zip(tokens, lengths, strict=True)])[None]
    places = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    with invariant(), patch_linear():
        trained = log_probabilities(model.train(), packed, position_ids=places, cu_seq_lens_q=starts)[0]
        inferred = infer(model, tokens[:8])
    for row, start, n in zip(inferred, starts.tolist(), lengths.tolist(), strict=False):
        assert torch.equal(trained[start : start + n - 1], row[: n - 1])


@pytest.fixture
def deterministic():
    """Without, torch adds the gradient of an embedding in any order on a GPU."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, device, deterministic):
    """A repeated forward pass has the bits of the first: the gradients are those without checkpoints."""
    model, tokens = model_of("qwen3_moe", device)
    gradients = []
    with invariant(), patch_linear():
        inferred = infer(model, tokens[:3])
        for checkpointed in (False, True):
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            trained = log_probabilities(model.train(), tokens)
            assert torch.equal(trained[:3], inferred)
            trained.mean().backward()
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("lacking", ["switch", "linear", "attention"])
def test_each_part_is_needed(lacking):
    """Without one of the three, the log-probabilities of most tokens differ."""
    model, tokens = model_of("qwen3_moe", CPU, kernel="sdpa" if lacking == "attention" else "by_products")
    with invariant(lacking != "switch"):
        patch = patch_linear()
        if lacking == "linear":
            patch.undo()
        with patch:
            trained = log_probabilities(model.train(), tokens)
            same = decode(model, tokens[:3, :SHORT]) == trained[:3, : SHORT - 1]
    assert same.float().mean() < 0.9


ROWS = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(-1), reduction="none"),
}


@dtypes
@pytest.mark.parametrize("name", ROWS)
def test_functions_of_rows_are_invariant_in_torch(name, dtype, device):
    for width in (60, 64, 2048):
        x = torch.randn(1000, width, device=device).to(dtype)
        many = ROWS[name](x)
        for size in (1, 2, 7, 100):
            some = torch.randperm(len(x))[:size]
            assert torch.equal(ROWS[name](x[some]), many[some]), (width, size)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dtypes
@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid])
def test_activations_are_invariant_in_torch_if_rows_fill_vectors(function, dtype, one_thread):
    x = torch.randn(1000, 64).to(dtype)
    many = function(x)
    assert all(torch.equal(function(x[i]), many[i]) for i in range(100))


@pytest.mark.gpu
@dtypes
@torch.no_grad()
def test_engine_in_a_cuda_graph(dtype, no_debug):
    """The policy of the example, whose weights and tokens have fixed addresses."""
    device = torch.device("cuda", 0)
    policy, tokens = Policy().to(device, dtype), torch.randint(32, (256, 12), device=device)
    with invariant(), patch_linear():
        trained, some = policy(tokens), tokens[:3].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            policy(some)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inferred = policy(some)
    for first in (0, 100):
        some.copy_(tokens[first : first + 3])
        graph.replay()
        assert torch.equal(inferred, trained[first : first + 3])
