"""Check the inputs of ops, and split rows into groups for references.

The checks also run in the fake implementations, so a compiled program makes the same checks.
"""

import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import private_api
from ...op import INTEGERS, notes_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)
OCP = (torch.float8_e4m3fn, torch.float8_e5m2)  # the formats of the Open Compute Project
ACCEPTED = {int: INTEGERS, float: (numbers.Real, torch.SymFloat, torch.SymInt)}
WORDS = {int: "an int", float: "a number", Tensor: "a tensor", torch.nn.Module: "a module"}
NONE = type(None)
T = typing.TypeVar("T")
Function = typing.TypeVar("Function", bound=Callable)


def check_group(**groups: object) -> None:
    """Raise unless every group is None or a process group."""
    for name, group in groups.items():
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"{name} must be a process group, not {type(group).__name__}")


def check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")


def check_plan(plan: tuple[Tensor, Tensor, Tensor]) -> None:
    """Raise unless `plan` has the three tensors of a RoutePlan; another tuple will do."""
    if not isinstance(plan, (tuple, list)):
        raise TypeError(f"plan must be order, rank and group_sizes, not {type(plan).__name__}")
    if len(plan) != 3:
        raise ValueError(f"plan must be order, rank and group_sizes, but it has {len(plan)} items")


def check_shape(name: str, x: Tensor, *axes: str) -> None:
    """Raise unless `x` is a tensor with as many dimensions as there are axis names."""
    check_tensor(name, x)
    if x.dim() != len(axes):
        raise ValueError(f"{name} must be ({', '.join(axes)}), but it has shape {tuple(x.shape)}")


def check_size(what: str, size: int, other: str, expected: int) -> None:
    """Raise unless two sizes agree, naming both: `x is (M, K=64) but w is (G, K=32, N)`."""
    if size != expected:
        raise ValueError(f"{what.format(size)} but {other.format(expected)}")


def check_known(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(choices)}")


def check_axes(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Raise unless each tensor has the axes that its words name, and axes of one name have one size.

    Return the size of each axis.

    `check_axes(x=(x, "M, K"), w=(w, "G, K, N"))` may say: x is (M, K=64) but w is (G, K=32, N).
    """
    sizes: dict[str, tuple[str, int]] = {}  # an axis -> the first tensor that has it, and its size
    for name, (x, axes) in tensors.items():
        check_shape(name, x, *axes.split(", "))
        for axis, size in zip(axes.split(", "), x.shape, strict=True):
            first, expected = sizes.setdefault(axis, (name, size))
            if size != expected:
                there = with_size(first, tensors[first][1], axis, expected)
                raise ValueError(f"{there} but {with_size(name, axes, axis, size)}")
    return {axis: size for axis, (_, size) in sizes.items()}


Operand = Annotated[Tensor, "operand"]  # a field of an op's inputs: floating, of one dtype with all operands
Float = Annotated[Tensor, "float"]  # of any floating dtype
Extra = Annotated[Tensor, "extra"]  # the same, and all its axes are those of other fields
Float8 = Annotated[Tensor, "float8"]  # an 8-bit float with infinities or NaN, as the OCP defines it
Index = Annotated[Tensor, "index"]  # int32 or int64
KINDS = ("written", "operand", "float", "extra", "float8", "index", None)  # all other notes name axes


def check_fields(i: tuple) -> dict[str, int]:
    """Raise unless the tensors of an op's inputs are what their fields' annotations say, and on one device.

    `Annotated[Operand, "M, K"]` is an operand with these axes.  Axes of one name have one size in all fields;
    return the size of each.  A field that may be None is checked where it is not.
    """
    fields = zip(notes_of(type(i)).items(), i, strict=True)
    given = {name: (t, notes) for (name, notes), t in fields if not (t is None and None in notes)}
    axes = {name: (t, note) for name, (t, notes) in given.items() for note in notes if note not in KINDS}

    def of(kind: str) -> dict[str, Tensor]:
        return {name: t for name, (t, notes) in given.items() if kind in notes}

    extra = of("extra")
    sizes = check_axes(**{name: pair for name, pair in axes.items() if name not in extra})
    for name, t in extra.items():
        check_whole_shape(name, t, tuple(sizes[axis] for axis in axes[name][1].split(", ")))
    if operands := of("operand"):
        check_float(**operands)
    for name, t in (of("float") | extra).items():
        check_float(**{name: t})
    for name, t in of("float8").items():
        if t.dtype not in OCP:
            raise TypeError(f"{name} must be of 8-bit floats, not {t.dtype}")
    check_index(**of("index"))
    fields = sorted(given.items(), key=lambda field: "written" in field[1][1])  # what is read has the device
    check_device(**{name: t for name, (t, _) in fields if isinstance(t, Tensor)})
    return sizes


def check_whole_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise unless `x` is a tensor of this shape."""
    check_tensor(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} is {tuple(x.shape)} but must be {tuple(shape)}")


def with_size(name: str, axes: str, axis: str, size: int) -> str:
    """Return the axes of a tensor in words, with the size of one of them: `x is (M, K=64)`."""
    words = [f"{a}={size}" if a == axis else a for a in axes.split(", ")]
    return f"{name} is ({', '.join(words)}{',' if len(words) == 1 else ''})"


def check_sizes(**sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, INTEGERS) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, not {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def check_flags(**flags: bool) -> None:
    """Raise unless every flag is a bool: "no" would count as True."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{name} must be a bool, not {type(flag).__name__}")


def check_real(name: str, number: float) -> None:
    if not is_kind(number, float):
        raise TypeError(f"{name} must be a number, not {type(number).__name__}")


def check_range(values: dict[str, float], within: Callable[[float], bool], words: str) -> None:
    """Raise unless every number is `within` a range, of which `words` speak."""
    for name, number in values.items():
        check_real(name, number)
        if not within(number):
            raise ValueError(f"{name} must be {words}, not {number}")


def check_not_negative(**values: float) -> None:
    """Raise unless every number is finite and at least 0."""
    check_range(values, lambda n: 0 <= n < math.inf, "at least 0 and finite")


def check_positive(**values: float) -> None:
    """Raise unless every number is finite and above 0."""
    check_range(values, lambda n: 0 < n < math.inf, "above 0 and finite")


def check_finite(**values: float) -> None:
    """Raise unless every number is finite."""
    check_range(values, lambda n: -math.inf < n < math.inf, "finite")


def check_probability(**values: float) -> None:
    """Raise unless every number is from 0 to 1."""
    check_range(values, lambda n: 0 <= n <= 1, "from 0 to 1")


def is_kind(value: object, kind: type) -> bool:
    """Whether a value is of the kind that an annotation names.

    numpy's integers are ints and ints are floats, but a bool is neither.
    """
    if kind in ACCEPTED:
        return isinstance(value, ACCEPTED[kind]) and not isinstance(value, bool)
    return isinstance(value, kind)


def checked(fn: Function) -> Function:
    """Let `fn` raise TypeError unless each argument is of the kind that its annotation names.

    For constructors, and for functions that are not called for every batch.  Annotations other than plain
    types and unions of them are not checked.
    """
    kinds = {name: plain_types(annotation) for name, annotation in fn.__annotations__.items()}
    kinds = {name: options for name, options in kinds.items() if options}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]

    @functools.wraps(fn)
    def run(*args, **kwargs):
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            options = kinds.get(name)
            if options and not any(is_kind(value, kind) for kind in options):
                words = " or ".join(
                    WORDS.get(kind) or with_article(kind.__name__) for kind in options if kind is not NONE
                )
                raise TypeError(f"{name} must be {words}, not {type(value).__name__}")
            if isinstance(value, str) and torch.device in (options or ()):
                check_device_name(name, value)
        return fn(*args, **kwargs)

    return run


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def check_device_name(name: str, device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{name} is {device!r}, but torch has no such device") from error


def check_layout(layout: tuple[int, int]) -> None:
    """Raise unless `layout` has two sizes."""
    if not isinstance(layout, (tuple, list)):
        raise TypeError(f"layout must be two ints, not {type(layout).__name__}")
    if len(layout) != 2:
        raise ValueError(f"layout must be (rows, columns / 2), not {layout}")
    check_sizes(**{"layout[0]": layout[0], "layout[1]": layout[1]})


def check_parameter_dtype(dtype: torch.dtype | None) -> None:
    """Raise unless parameters can have this dtype."""
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, not {dtype}")


def plain_types(annotation: object) -> tuple[type, ...]:
    """The types that an annotation joins by `|`; none if one of them is no plain type."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = all(isinstance(kind, type) and typing.get_origin(kind) is None for kind in options)
    plain = plain and typing.Any not in options
    return options if plain else ()


def renamed(**names: str) -> Callable[[Function], Function]:
    """Let errors of a wrapper name arguments as its caller does: `renamed(x="XQ")` says XQ for x.

    Nothing is done before there is an error.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b")

    def wrap(fn: Function) -> Function:
        @functools.wraps(fn)
        def run(*args, **kwargs):
            try:
                return fn(*args, **kwargs)
            except (TypeError, ValueError) as error:
                error.args = tuple(
                    words.sub(lambda found: names[found[0]], text) if isinstance(text, str) else text
                    for text in error.args
                )
                raise

        return run

    return wrap


def fourth_argument(
    fn: Callable, given: tuple, **named: Tensor | torch.dtype | None
) -> tuple[Tensor | None, torch.dtype | None]:
    """Return the tensor and the dtype that are `named`, one of them from the positional arguments `given`.

    AITER's grouped products took a dtype in the fourth place in 2025, and take a tensor there in 2026.
    """
    (tensor, dtype), value = named, given[0]
    keywords = ", ".join(f"{name}=" for name in fn.__kwdefaults__)
    if len(given) > 1:
        raise TypeError(
            f"{fn.__name__} takes four positional arguments, the fourth {tensor} or {dtype}, but "
            f"{3 + len(given)} were given: give the others by name: {keywords}"
        )
    if not (value is None or isinstance(value, (Tensor, torch.dtype))):
        raise TypeError(
            f"the fourth positional argument of {fn.__name__} must be {tensor}, a tensor, or {dtype}, a "
            f"dtype, not {type(value).__name__}: by name there are {keywords}"
        )
    if value is not None:
        name = tensor if isinstance(value, Tensor) else dtype
        if named[name] is not None:
            raise TypeError(f"{name} is given twice: in the fourth place and by name")
        named[name] = value
    return named[tensor], named[dtype]


def check_float(**tensors: Tensor | None) -> None:
    """Raise unless every tensor given has the floating dtype of the first."""
    (first, x), *rest = tensors.items()
    if x.dtype not in FLOATS:
        raise TypeError(f"{first} must be float16, bfloat16, float32 or float64, not {x.dtype}")
    for name, t in rest:
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{first} is {x.dtype} but {name} is {t.dtype}")


def check_floating(name: str, t: Tensor | None, shape: tuple[int, ...], words: str = "{}") -> None:
    """Raise unless `t` has this shape, which a message says by `words`, and any floating dtype."""
    if t is not None and (t.shape != shape or t.dtype not in FLOATS):
        found = f"{t.dtype} {tuple(t.shape)}"
        raise ValueError(f"{name} must be floating {words.format(tuple(shape))}, but it is {found}")


def check_index(**tensors: Tensor) -> None:
    """Raise unless every tensor is int32 or int64."""
    for name, t in tensors.items():
        if t.dtype not in INDICES:
            raise TypeError(f"{name} must be int32 or int64, not {t.dtype}")


def check_own_memory(name: str, x: Tensor) -> None:
    """Raise for a tensor whose elements may share memory, as those of an expanded one do."""
    reach = 0  # from the first element to the last, along the axes of smaller strides
    for step, size in sorted(zip(x.stride(), x.shape, strict=True), key=lambda axis: axis[0]):
        if step <= reach and size > 1 and x.numel():
            how = "has strides that overlap" if step else "is expanded"
            raise ValueError(f"{name} {how}: its elements must not share memory")
        reach += step * (size - 1)


def check_device(**tensors: Tensor | None) -> None:
    """Raise unless every tensor given is on the device of the first."""
    (first, x), *rest = tensors.items()
    for name, t in rest:
        if t is not None and t.device != x.device:
            raise ValueError(f"{first} is on {x.device} but {name} is on {t.device}")


def check_routing_weights(routing_weights: Tensor, rank: Tensor, x: Tensor) -> None:
    """Raise unless there is a floating weight for each choice."""
    if routing_weights.shape != rank.shape:
        shapes = tuple(routing_weights.shape), tuple(rank.shape)
        raise ValueError("routing_weights is {} but the plan is for (T, k) = {}".format(*shapes))
    if not routing_weights.is_floating_point():
        raise TypeError(f"routing_weights must be floating, not {routing_weights.dtype}")
    check_device(x=x, routing_weights=routing_weights)


def needs_grad(*tensors: object) -> bool:
    """Whether a gradient of one of these is needed, of which some may be None."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def refuse_gradient(what: str, *tensors: Tensor | None) -> None:
    """Raise where one of these would need a gradient through what has none."""
    if needs_grad(*tensors):
        raise RuntimeError(f"{what} has no gradient: call it under torch.no_grad()")


# groups of rows: checks, and pieces of references


def split_groups(x: Tensor, group_sizes: Tensor) -> tuple[Tensor, ...]:
    """The rows of each group, and last the rows past them; sizes are clamped to the rows there are."""
    return x.tensor_split(group_ends(group_sizes, len(x)))


def group_ends(group_sizes: Tensor, rows: int) -> list[int]:
    """Return the row where each group ends, at most `rows`.  Synchronises."""
    ends, end = [], 0
    for size in group_sizes.tolist():
        end = min(end + max(size, 0), rows)
        ends.append(end)
    return ends


def take_rows(x: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    """Row r of the result is x[order[r] // top_k]; x itself without an order."""
    return x if order is None else x[order.clamp(min=0).long() // top_k]


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x))


def cast_as_linear(*tensors: T) -> tuple[T, ...]:
    """Cast as torch.autocast, if enabled, would for F.linear: to its dtype; float64 and 8-bit floats stay."""
    if not (torch.compiler.is_compiling() or private_api.any_autocast()):
        return tensors
    device = tensors[0].device.type
    if tensors[0].is_meta or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if is_cast(t, device) else t for t in tensors)


def is_cast(t: Tensor | None, device: str) -> bool:
    """Whether autocast casts it; a weight of 4 bits is asked by its dtype, as it is no tensor."""
    if t is None or t.device.type != device:
        return False
    return t.dtype.is_floating_point and t.dtype.itemsize in (2, 4)


STEP = 32  # 16-bit numbers of a row that AMX multiplies at a time
FAR = 2**30  # of them are 2**31 bytes


def reads_on(x: Tensor) -> bool:
    """Whether torch's product reads on behind the rows of x (..., M, K), and multiplies what lies there by 0.

    torch does so on CPUs with AMX, in 16 bits, if K is no multiple of 32: a NaN or infinity of one row makes
    the row before it NaN.  If the columns of `x` lie side by side, torch copies them first and is right.
    """
    if private_api.AMX and x.is_cpu and x.itemsize == 2 and x.dim() > 1 and x.numel() > x.shape[-1]:
        return x.stride(-1) == 1 and (x.shape[-1] % STEP > 0 or x.stride(-2) != x.shape[-1])
    return False


def apart(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of `x @ w`, (..., M, K) and (..., K, N), padded with zeros if torch `reads_on`.

    On CPUs with AMX, torch's product of 16 bits also ends the process where numbers lie 2**31 bytes apart:
    such operands are copied.
    """
    if private_api.AMX and x.is_cpu and x.itemsize == 2:
        x, w = (t.contiguous() if extent(t) >= FAR else t for t in (x, w))
    if not reads_on(x):
        return x, w
    rest = -x.shape[-1] % STEP
    return F.pad(x, (0, rest)).contiguous(), F.pad(w, (0, 0, 0, rest))


def extent(t: Tensor) -> int:
    """Return how many numbers behind the first of `t` the last one lies."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def multiply_apart(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w` whose rows are `apart`."""
    x, w = apart(x, w)
    return x @ w


def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Give axes of size 1 the strides of a contiguous tensor, without a copy: cuBLAS may refuse another."""
    return tuple(t.view(t.shape) if t.is_cuda and 1 in t.shape and t.is_contiguous() else t for t in tensors)


class LinearApart(torch.autograd.Function):
    """F.linear whose rows are `apart`, forward and backward, for operands of one dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        x, w = apart(x, weight.mT)
        return F.linear(x, w.mT, bias)

    @staticmethod
    def backward(ctx, dout):
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        dx = multiply_apart(dout, weight) if needs[0] else None
        # not -1, which says nothing where a row has no columns
        rows, x_rows = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (dout, x))
        dweight = multiply_apart(rows.mT, x_rows) if needs[1] else None
        return dx, dweight, rows.sum(0) if needs[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear whose rows are `apart`."""
    if private_api.AMX and x.is_cpu:
        x, weight = cast_as_linear(x, weight)
        if x.itemsize == 2 and x.dtype == weight.dtype and any(n % STEP for n in weight.shape):
            return LinearApart.apply(x, weight, bias if bias is None else bias.to(x.dtype))
    return F.linear(x, weight, bias)


def check_rows(name: str, x: Tensor, axis: str, order: Tensor | None, top_k: int, rows: int) -> None:
    """Raise unless `x`, read at order // top_k where there is an order, has as many rows as asked."""
    check_shape(name, x, "M" if order is None else "T", axis)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if order is not None:
        check_shape("order", order, "M")
        check_index(order=order)
        check_size("order is ({},)", order.shape[0], "there are {} rows", rows)
        if rows > x.shape[0] * top_k:
            raise ValueError(
                f"{name} is (T={x.shape[0]}, {axis}) for top_k={top_k}, {x.shape[0] * top_k} rows, "
                f"but order is ({rows},)"
            )
    else:
        check_size(f"{name} is ({{}}, {axis})", x.shape[0], "it takes {} rows", rows)


def check_row_values(x: Tensor, i) -> None:
    """Do as `check_plan_values` for inputs `i` of an op that reads `x` as `check_rows` says."""
    rows = len(x if i.order is None else i.order)
    check_plan_values(rows, i.group_sizes, i.order, choices=len(x) * i.top_k)


def check_order(order: Tensor, rank: Tensor) -> None:
    """Raise if `order` (R,) has more rows than `rank` (T, k) has choices."""
    if order.shape[0] > rank.numel():
        raise ValueError(f"order is (R={order.shape[0]},) but rank (T, k) holds {rank.numel()} choices")


def check_groups(group_sizes: Tensor, x: Tensor, name: str = "x", **others: Tensor | None) -> None:
    """Raise unless the group sizes are (G,) integers, and everything is on the device of `x`, called so."""
    check_shape("group_sizes", group_sizes, "G")
    check_index(group_sizes=group_sizes)
    check_device(**{name: x}, group_sizes=group_sizes, **others)


def oriented(name: str, x: Tensor, axis: int, size: int, swapped: bool | None) -> Tensor:
    """`x` with its last two axes as documented, `axis`, -1 or -2, being of that size.

    They are swapped if the caller says so by the argument `name`, or does not say and only the
    other one is of that size.
    """
    if swapped is None:
        swapped = x.shape[axis] != size and x.shape[-3 - axis] == size
    else:
        check_flags(**{name: swapped})
    return x.mT if swapped else x


def result_dtype(preferred: torch.dtype | None, x: Tensor) -> torch.dtype:
    """The dtype of a fresh result: as preferred, or that of `x`."""
    if preferred is None:
        return x.dtype
    if preferred not in FLOATS:
        raise TypeError(f"preferred_element_type must be a floating dtype, not {preferred}")
    return preferred


def check_existing(out: Tensor, preferred: torch.dtype | None) -> None:
    """Raise unless `out` is a tensor of the dtype that is preferred, if any is."""
    check_tensor("existing_out", out)
    if preferred not in (None, out.dtype):
        raise TypeError(f"existing_out is {out.dtype} but preferred_element_type is {preferred}")


def check_plan_values(
    rows: int, group_sizes: Tensor | None = None, order: Tensor | None = None, rank: Tensor | None = None,
    choices: int | None = None,
) -> None:  # fmt: skip
    """Raise unless these tensors of a plan for so many rows fit together; synchronises.

    Group sizes are not negative, sum to `rows` at most and count no dropped row; order stays below `choices`,
    by default those of rank, or `rows` without one; rank stays below `rows`; both are inverse.
    """
    if choices is None:
        choices = rows if rank is None else rank.numel()
    for name, t, limit, what in (("order", order, choices, "choices"), ("rank", rank, rows, "rows")):
        if t is not None and t.numel() and t.max() >= limit:
            raise ValueError(f"{name} holds {int(t.max())} but there are {limit} {what}")
    if group_sizes is not None:
        sizes = group_sizes.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) > rows:
            raise ValueError(f"group_sizes {sizes} must not be negative nor sum to more than {rows} rows")
        if order is not None and (order[: sum(sizes)] < 0).any():
            raise ValueError(f"order drops a row that group_sizes {sizes} count")
    if order is not None and rank is not None:
        choices = (rank.flatten() >= 0).nonzero().flatten()
        held = order[rank.flatten()[choices].long()]
        if len(choices) != (order >= 0).sum() or not torch.equal(held.long(), choices):
            raise ValueError(
                "rank is not the inverse of order: rank[t, j] is the row r where order[r] is t*k + j"
            )
