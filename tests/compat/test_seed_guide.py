"""The examples of the AITER guide, but for the import and the device.

On a CPU the batch of its largest ones is 2 instead of 32: their results would take half a gigabyte.
"""

import dataclasses

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import moe_aiter.compat.aiter as aiter
from moe_aiter.compat.aiter import KERNELS
from moe_aiter.switches import get_log_level, set_log_level, switches

from .seeds import near


@pytest.fixture(autouse=True)
def restored():
    before = dataclasses.asdict(switches), aiter.get_cache_size(), get_log_level(), dict(KERNELS)
    yield
    for name, value in before[0].items():
        setattr(switches, name, value)
    aiter.set_cache_size(before[1])
    set_log_level(before[2])
    KERNELS.clear()
    KERNELS.update(before[3])


def batch(device):
    return 32 if device.type == "cuda" else 2


def test_verifying_the_installation(device, capsys):
    # Check AITER version
    print(f"AITER version: {aiter.__version__}")
    # Create a simple tensor and run an AITER operation
    x = torch.randn(10, 10, device=device)
    y = aiter.matmul(x, x)
    print("AITER operation successful!")
    near(y, x.double() @ x.double())
    assert capsys.readouterr().out.startswith("AITER version: ")


def test_configuration():
    # Configure AITER
    aiter.set_log_level("INFO")
    aiter.set_cache_size(1024)  # MB
    aiter.enable_fusion(True)
    aiter.enable_tensor_cores(True)
    aiter.set_default_precision("FP16")
    assert (aiter.get_log_level(), aiter.get_cache_size()) == ("INFO", 1024)
    assert aiter.fusion_enabled() and aiter.tensor_cores_enabled()
    assert aiter.get_default_precision() == "FP16"


def test_matrix_multiplication(device):
    # Create input tensors
    x = torch.randn(1024, 1024, device=device)
    y = torch.randn(1024, 1024, device=device)
    # Matrix multiplication
    z = aiter.matmul(x, y)
    near(z, x.double() @ y.double())


def test_convolution(device):
    input = torch.randn(batch(device), 3, 224, 224, device=device)
    weight = torch.randn(64, 3, 3, 3, device=device)
    output = aiter.conv2d(input, weight, stride=1, padding=1)
    assert output.shape == (len(input), 64, 224, 224)
    near(output[:1], F.conv2d(input[:1].double(), weight.double(), padding=1))


def test_attention(device):
    q = torch.randn(batch(device), 8, 512, 64, device=device)
    k = torch.randn(batch(device), 8, 512, 64, device=device)
    v = torch.randn(batch(device), 8, 512, 64, device=device)
    attention = aiter.attention(q, k, v)
    near(attention[:1], F.scaled_dot_product_attention(*(t[:1].double() for t in (q, k, v))))


class AITERConv2d(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.stride = stride
        self.padding = padding

    def forward(self, x):
        return aiter.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class AITERLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x):
        return aiter.linear(x, self.weight, self.bias)


class SimpleModel(nn.Module):
    """With the modules that a program writes for itself, or those that are here."""

    def __init__(self, conv, linear, size):
        super().__init__()
        self.conv = conv(3, 64, 3, padding=1)
        self.relu = nn.ReLU()
        self.linear = linear(64 * size * size, 1000)

    def forward(self, x):
        x = self.conv(x)
        x = self.relu(x)
        x = x.view(x.size(0), -1)
        x = self.linear(x)
        return x


MODULES = [(AITERConv2d, AITERLinear), (aiter.AITERConv2d, aiter.AITERLinear)]


@pytest.mark.parametrize("modules", MODULES, ids=["written", "here"])
def test_use_in_a_model(modules, device):
    """Of pictures of 16 by 16: for 224 by 224 the weight is of 12 GiB."""
    model = SimpleModel(*modules, 16).to(device)
    input = torch.randn(32, 3, 16, 16, device=device)
    output = model(input)
    assert output.shape == (32, 1000)
    near(output, model.double()(input.double()))
    model.float()(input).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
def test_use_in_a_model_with_a_weight_of_12_gib(most_of_the_gpu):
    with torch.device("cuda"):
        model = SimpleModel(aiter.AITERConv2d, aiter.AITERLinear, 224)
    input = torch.randn(32, 3, 224, 224, device="cuda")
    with torch.no_grad():
        output = model(input)
        rows = model.relu(model.conv(input)).flatten(1)
        assert output.shape == (32, 1000)
        for n in (0, 999):
            near(output[:, n], (rows.double() * model.linear.weight[n].double()).sum(1))


class AITERAttention(torch.nn.Module):
    def __init__(self, hidden_size, num_heads, dropout_prob=0.0):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.query = torch.nn.Linear(hidden_size, hidden_size)
        self.key = torch.nn.Linear(hidden_size, hidden_size)
        self.value = torch.nn.Linear(hidden_size, hidden_size)
        self.output = torch.nn.Linear(hidden_size, hidden_size)
        self.dropout = torch.nn.Dropout(dropout_prob)

    def forward(self, hidden_states, attention_mask=None):
        batch_size, seq_length = hidden_states.shape[:2]
        # Project queries, keys, and values
        q = self.query(hidden_states)
        k = self.key(hidden_states)
        v = self.value(hidden_states)
        # Reshape for multi-head attention
        q = q.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        k = k.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        v = v.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        # Use AITER's optimized attention
        context_layer = aiter.attention(q, k, v, attention_mask)
        # Reshape back
        context_layer = context_layer.transpose(1, 2).contiguous()
        context_layer = context_layer.view(batch_size, seq_length, self.hidden_size)
        # Output projection
        output = self.output(context_layer)
        output = self.dropout(output)
        return output


@pytest.mark.parametrize("mask", [None, "keys"])
def test_optimized_attention(mask, device):
    written = AITERAttention(64, 4).to(device)
    here = aiter.AITERAttention(64, 4).to(device)
    here.load_state_dict(written.state_dict())
    x = torch.randn(2, 10, 64, device=device)
    mask = (
        None if mask is None else torch.arange(10, device=device) < torch.tensor([[10], [6]], device=device)
    )
    exact = written.double()(x.double(), mask)
    written.float()
    for model in (written, here):
        near(model(x, mask), exact)
        model(x, mask).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_custom_kernel_registration(device):
    # Define a custom kernel function
    @aiter.register_kernel
    def custom_activation(x):
        # Implementation
        return torch.pow(x, 2) * torch.sigmoid(x)

    # Use the custom kernel
    x = torch.randn(1000, 1000, device=device)
    y = custom_activation(x)
    assert torch.equal(y, torch.pow(x, 2) * torch.sigmoid(x))
    assert aiter.get_kernel("custom_activation") is custom_activation


def test_quantization(device):
    # Create a model
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).to(
        device
    )
    # Quantize the model
    quantized_model = aiter.quantize(model, dtype="int8")
    # Run inference
    input_data = torch.randn(32, 1024, device=device)
    output = quantized_model(input_data)
    assert output.dtype == torch.float32
    near(output, model.double()(input_data.double()), 3e-2)


def test_dynamic_shapes(device):
    # Enable dynamic shape support
    aiter.enable_dynamic_shapes(True)

    # Create a model with dynamic shape support
    class DynamicModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 64, 3, padding=1)

        def forward(self, x):
            # x can have variable batch size and spatial dimensions
            return aiter.dynamic_conv2d(x, self.conv.weight, self.conv.bias, stride=1, padding=1)

    # Use with different shapes
    model = DynamicModel().to(device)
    input1 = torch.randn(4, 3, 224, 224, device=device)
    input2 = torch.randn(8, 3, 112, 112, device=device)
    output1 = model(input1)  # Shape: [4, 64, 224, 224]
    output2 = model(input2)  # Shape: [8, 64, 112, 112]
    assert output1.shape == (4, 64, 224, 224) and output2.shape == (8, 64, 112, 112)
    near(output2, model.conv.double()(input2.double()))
