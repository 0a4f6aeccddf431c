"""How torch knows an op, and how a call reaches it past torch's dispatcher, where that would add nothing.

Whether it would is asked of private functions of torch: of modes, vmap, batched gradients and the graph that
runs there are no public ones.
"""

import numbers
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad

from .metadata import PLAIN, completion

LIB = torch.library.Library("moe_aiter", "DEF")
GRADIENTS_BATCHED = torch._C._dispatch_key_parse("VmapMode")
INTEGERS = (int, torch.SymInt, numbers.Integral)
KINDS = {  # in a schema -> in Python, and in words
    "Tensor": (Tensor, "a tensor"),
    "Optional[Tensor]": ((Tensor, type(None)), "a tensor or None"),
    "int": (INTEGERS, "an int"),
    "float": ((numbers.Real, torch.SymFloat, torch.SymInt), "a number"),
    "bool": ((bool, torch.SymBool), "a bool"),
    "str": (str, "a str"),
}


def register(
    schema: str, run: Callable, fake: Callable, backward: Callable | None, save: Callable | None
) -> Callable:
    """Tell torch about an op: its implementation on every device, its fake and its gradient.

    Returns a function that calls it, after a look for what torch would pass over or refuse obscurely.
    """
    name = schema.partition("(")[0]
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.moe_aiter, name).default
    whole = completion(op._schema.arguments)
    mutates = "!" in schema
    # torch would record what is written in place by products of its own, or refuse them
    unrecorded = torch.no_grad()(run) if mutates else run
    LIB.impl(name, lambda *inputs: unrecorded(*whole(inputs)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_aiter::{name}", lambda *inputs: fake(*whole(inputs)), lib=LIB)
    if backward is not None:
        torch.library.register_autograd(f"moe_aiter::{name}", backward, setup_context=save, lib=LIB)
    arguments = [(a.name, *KINDS.get(str(a.type), (object, ""))) for a in op._schema.arguments]
    short = run if mutates else shortcut(name, run, backward, save)
    known = set()  # types of inputs that are what the op wants, and plain

    def call(*inputs):
        inputs = whole(inputs)
        if torch.compiler.is_compiling():
            return op(*inputs)
        kinds = tuple(map(type, inputs))
        if kinds not in known or is_transformed() or inputs[0].is_meta:
            check_kinds(arguments, inputs)
            check_transforms(name, inputs, mutates)
            # one sample after another, of which torch's dispatcher knows no way to write in place
            if not is_plain(inputs) or (is_batched() and not mutates):
                return op(*inputs)
            if PLAIN.issuperset(kinds):
                known.add(kinds)
        elif torch._C._len_torch_dispatch_stack():
            return op(*inputs)
        return op(*inputs) if mutates and torch.is_grad_enabled() else short(*inputs)

    return call


def compose(schema: str, fn: Callable) -> None:
    """Tell torch about an op that consists of torch's: its gradient, fake and compiled form are theirs."""
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(schema.partition("(")[0], fn, "CompositeImplicitAutograd")


def check_kinds(arguments: list[tuple], inputs: tuple) -> None:
    for (argument, kind, words), given in zip(arguments, inputs, strict=True):
        # a bool is an int to Python, and a mistake here
        if not isinstance(given, kind) or (isinstance(given, bool) and words in ("an int", "a number")):
            raise TypeError(f"{argument} must be {words}, not {type(given).__name__}")


def shortcut(name: str, run: Callable, backward: Callable, save: Callable | None) -> Callable:
    """The op without torch's dispatcher, whose way to an op from Python takes longer than a small kernel."""

    def forward(ctx, *inputs):
        out = run(*inputs)
        if save is not None:
            save(ctx, inputs, out)
        return out

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), functions)
    apply = super(torch.autograd.Function, function).apply  # without what is for torch.func

    def call(*inputs):
        if torch.is_grad_enabled():
            for t in inputs:
                if isinstance(t, Tensor) and t.requires_grad:
                    return (function.apply if peek_interpreter_stack() is not None else apply)(*inputs)
        return run(*inputs)

    return call


def saved_tensors(ctx) -> tuple:
    """Return ctx.saved_tensors.  If x, of the shape ctx.x_shape, changed in place, the error says so."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if f"Tensor {list(ctx.x_shape)}]" not in str(error):
            raise
        raise RuntimeError(
            f"x of MoE or Experts, {tuple(ctx.x_shape)}, was changed in place after the forward pass, and "
            "backward needs x as it was: write x = x + y instead of x += y"
        ) from error


def is_plain(inputs: tuple) -> bool:
    """Whether torch's dispatcher would do nothing but run the op: no mode, subclass or fake tensor."""
    hidden = [isinstance(t, Tensor) and (type(t) not in PLAIN or t.is_meta) for t in inputs]
    return torch._C._len_torch_dispatch_stack() == 0 and not any(hidden)


def is_unwatched(*tensors: Tensor) -> bool:
    """Whether no compiler, mode or graph of gradients would see memory change."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and is_plain(tensors)


def is_last_use(saved: Tensor) -> bool:
    """Whether the backward pass that runs is the last that can ask for what is saved.

    Not where the graph is kept, nor where a CUDA graph may replay this pass without the forward pass.
    """
    replayed = saved.is_cuda and torch.cuda.is_current_stream_capturing()
    return not replayed and not torch._C._autograd._get_current_graph_task_keep_graph()


def is_transformed() -> bool:
    """Whether torch.func, autograd's is_grads_batched or forward-mode AD is at work."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0 or is_batching_gradients()


def is_batching_gradients() -> bool:
    """Whether torch.autograd.grad runs backward for many gradients at once, as jacobian(vectorize=True)."""
    return torch._C._dispatch_tls_is_dispatch_key_included(GRADIENTS_BATCHED)


def is_batched() -> bool:
    """Whether a vmap is at work."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return is_batching_gradients() or any(level.key() == TransformType.Vmap for level in levels)


def check_transforms(name: str, inputs: tuple, mutates: bool) -> None:
    """Refuse forward-mode AD, whose tangents torch would drop without a word, and torch.func's gradients.

    Many gradients at once too, where memory changes.
    """
    if mutates and is_batching_gradients():
        raise NotImplementedError(
            f"moe_aiter::{name} takes one gradient at a time: not is_grads_batched=True nor vectorize=True"
        )
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels) or (
        forward_ad._current_level >= 0
        and any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)
    ):
        raise NotImplementedError(
            f"moe_aiter::{name} has gradients by torch.autograd only, not by forward-mode AD or torch.func; "
            "for those of each sample ask torch.autograd.grad once a sample"
        )


def refuse(name: str) -> Callable:
    """A backward for ops without one: torch alone would warn, and go on without this op's share."""

    def backward(ctx, *grads):
        raise RuntimeError(f"moe_aiter::{name} has no gradient; a second derivative may have asked for it")

    return backward
