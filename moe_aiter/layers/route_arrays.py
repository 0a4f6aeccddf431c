"""Routes in the forms in which engines and training frameworks hand them over, as tensors.

a tensor, a NumPy array, lists          (tokens, layers, k); a padded batch (batch, tokens, layers, k)
text or bytes of a .npy file            vLLM's server: the file in base64
text or bytes of the numbers alone      SGLang: int32 in base64, in the order (tokens, layers, k)
a mapping or object with data, shape    prime-rl: `data` as bytes or in base64, and `dtype`
"""

import base64
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ..config import settings
from ..kernels.base.check import check_flags, check_known, check_shape, check_tensor, checked, is_kind
from .attached import plain_name

ANY_INTEGER = 2**63 - 1
UNSIGNED = torch.uint16, torch.uint32, torch.uint64
NPY = b"\x93NUMPY"  # how a .npy file begins
DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES += ["float16", "float32", "float64"]  # of weights
FIELDS = "data", "shape", "dtype", "start"  # of prime-rl's


class Route(NamedTuple):
    """The experts that the T tokens of one call of a layer went to."""

    expert_ids: Tensor  # (T, k) int16, int32 from 2**15 experts on; -1 drops a choice
    routing_weights: Tensor | None = None  # (T, k)


# forms


def array_of(name: str, array: object, shape: tuple[int, int] | None = None, dtype: str = "int32") -> Tensor:
    """Return an array of any form as a tensor; `shape` and `dtype` are those of numbers alone."""
    if isinstance(array, list | tuple):
        try:
            array = torch.tensor(array, device="cpu")
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{name} must be an array, but the lists do not form one: {error}") from error
    elif isinstance(array, str | bytes | bytearray | memoryview):
        array = from_bytes(name, array, shape, dtype)
    elif not isinstance(array, Tensor) and not hasattr(array, "__array_interface__"):  # NumPy's
        array = from_fields(name, array)
    tensor = array if isinstance(array, Tensor) else copied(array)
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor: pass pack_routes(tensor)")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be dense, not {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{name} must have values, but the device is meta")
    return tensor


def copied(array: Any) -> Tensor:
    """Return a NumPy array, which may be read-only, lie backwards or have another order of bytes."""
    array = np.asarray(array)
    return torch.tensor(np.array(array, array.dtype.newbyteorder("="), order="C"), device="cpu")


def from_bytes(name: str, data: Any, shape: tuple[int, int] | None, dtype: str) -> np.ndarray:
    data = decoded(name, data)
    if data.startswith(NPY):
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array
    if shape is None:
        raise ValueError(
            f"{name} is {len(data)} bytes without a shape: pass pack_routes(..., shape=(layers, k))"
        )
    return in_shape(name, data, dtype, (-1, *shape))


def from_fields(name: str, array: object) -> np.ndarray:
    fields = array if isinstance(array, Mapping) else {
        field: getattr(array, field) for field in FIELDS if hasattr(array, field)
    }  # fmt: skip
    if "data" not in fields or "shape" not in fields:
        raise TypeError(
            f"{name} must be tensors, NumPy arrays, lists, base64, or data with a shape, not "
            f"{type(array).__name__}"
        )
    if fields.get("start"):
        raise ValueError(
            f"{name} begins at token {fields['start']}: join the array with that of the tokens before"
        )
    dtype = fields.get("dtype", "uint8")  # prime-rl's, which left it out at first
    shape = fields["shape"]
    if not (isinstance(shape, list | tuple) and shape and all(is_kind(n, int) and n >= 0 for n in shape)):
        raise ValueError(f"the shape of {name} must be (tokens, layers, k), but it is {shape!r}")
    return in_shape(name, decoded(name, fields["data"]), dtype, tuple(shape))


def decoded(name: str, data: Any) -> bytes:
    if not isinstance(data, str):
        try:
            return memoryview(data).tobytes()
        except TypeError as error:
            raise TypeError(
                f"the data of {name} must be bytes or base64, not {type(data).__name__}"
            ) from error
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"{name} is text, but not base64: {error}") from error


def in_shape(name: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return little-endian numbers as an array; -1 stands for the number of tokens."""
    check_known(f"{name}: dtype", dtype, DTYPES)
    kind = np.dtype(dtype).newbyteorder("<")
    token = kind.itemsize * math.prod(shape[1:])
    tokens = len(data) // max(token, 1) if shape[0] < 0 else shape[0]
    if len(data) != tokens * token:
        raise ValueError(
            f"{name} is {len(data)} bytes, but {tokens} tokens of {kind.name} {shape[1:]} have "
            f"{tokens * token}"
        )
    return np.frombuffer(data, kind).reshape(tokens, *shape[1:])


def numbers(name: str, array: Tensor, floats: bool) -> Tensor:
    """Return ids, in a dtype where -1 and the number of experts fit, or with `floats` routing weights."""
    if floats:
        if not array.dtype.is_floating_point:
            raise TypeError(f"{name} must be floating, not {array.dtype}")
        return array
    if array.dtype.is_floating_point or array.dtype.is_complex or array.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.dtype in UNSIGNED:  # torch cannot compare them; the highest of 64 bits become negative
        wide = array.long()
        return wide.masked_fill(wide < 0, ANY_INTEGER) if array.dtype == torch.uint64 else wide
    return array if array.itemsize > 2 else array.int()


def by_tokens(name: str, array: Tensor, layers_first: bool | None, num_layers: int | None = None) -> Tensor:
    """Return an array as (tokens, layers, k); that of a padded batch has its tokens in order.

    With `layers_first` it is (layers, tokens, k).  For None, it is if only its first axis has `num_layers`.
    """
    if array.dim() == 4:
        array = array.flatten(0, 1)
    check_shape(name, array, "tokens", "layers", "k")
    if layers_first is None:
        layers_first = array.shape[0] == num_layers != array.shape[1]
    return array.transpose(0, 1) if layers_first else array


def depth(nested: object) -> int:
    """Return how many axes lists of numbers have, or 0 for anything else."""
    axes = 0
    while isinstance(nested, list | tuple) and not isinstance(nested, Route) and nested:
        nested, axes = nested[0], axes + 1
    return axes if isinstance(nested, int | float) else 0


# what `replay_routes` gets


def calls_of(
    routes: object, names: list[str], layers: Sequence[Any] | None, layers_first: bool | None, floats: bool
) -> dict[str, list[Route]]:
    """Return the routes of all calls of each layer; with `floats` weights, in place of `expert_ids`."""
    what = "weights" if floats else "routes"
    if is_by_layer(routes):
        if layers is not None:
            raise ValueError("layers are given, but routes are a dict, whose keys name the layers")
        for name in (*(set(names) - set(routes)), *(set(routes) - set(names))):
            has, lacks = ("the model has", what) if name in names else (f"{what} have", "the model")
            lacks = f"{lacks} do not" if lacks == what else f"{lacks} does not"
            raise ValueError(
                f"layer {name}: {has} it, {lacks} ({len(names)} layers, {len(routes)} in {what})"
            )
        return {name: [as_route(what, name, r, floats) for r in items(routes[name], 2)] for name in names}
    asked = "one for each column" if layers is None else f"and layers= names {len(layers)}"
    layers = range(len(names)) if layers is None else layers
    passes = []
    for array in items(routes, 3):
        array = by_tokens(what, numbers(what, array_of(what, array), floats), layers_first, len(layers))
        if array.shape[1] != len(layers):
            raise ValueError(
                f"the model has {len(names)} MoE layers, {names[0]} to {names[-1]}, {asked}, but "
                f"{what} are (tokens, layers={array.shape[1]}, k): select the layers that are MoE"
            )
        passes.append(array)
    columns = columns_by_layer(layers, names)
    return {name: [Route(array[:, c]) for array in passes for c in columns[name]] for name in names}


def is_by_layer(routes: object) -> TypeGuard[Mapping[str, object]]:
    """Whether routes are a dict of layers, not one of an array's fields."""
    return isinstance(routes, Mapping) and not {"data", "shape"} <= set(routes)


def items(arrays: Any, axes: int) -> Sequence[object]:
    """Return a list of arrays; one alone, which may be nested lists of so many axes, is a list of one."""
    several = isinstance(arrays, list | tuple) and not isinstance(arrays, Route) and depth(arrays) != axes
    return arrays if several else [arrays]


def columns_by_layer(layers: Sequence[Any], names: list[str]) -> dict[str, list[int]]:
    """The columns of each of the model's layers, whose `names` are given, and of others in `layers`."""
    columns: dict[str, list[int]] = defaultdict(list)
    for column, layer in enumerate(layers):
        if is_kind(layer, int):
            if not 0 <= layer < len(names):
                raise ValueError(
                    f"layers holds {layer}, but the model's MoE layers are 0 to {len(names) - 1}"
                )
            layer = names[layer]
        if not isinstance(layer, str):
            raise TypeError(f"layers must be names or numbers of layers, not {type(layer).__name__}")
        columns[plain_name(layer)].append(column)
    for name in names:
        if name not in columns:
            raise ValueError(
                f"layer {name}: the model has it, layers= does not ({len(names)} layers, {len(columns)})"
            )
    return columns


def as_route(what: str, name: str, route: object, floats: bool) -> Route:
    ids, weights = route if isinstance(route, Route) else (route, None)
    ids = numbers(f"{what} of {name}", array_of(f"{what} of {name}", ids), floats)
    check_shape(f"{what} of {name}", ids, "T", "k")
    return Route(ids, None if weights is None else array_of(f"weights of {name}", weights))


def with_weights(name: str, calls: list[Route], weights: list[Route]) -> list[Route]:
    """Return the routes of a layer's calls with weights that were given beside them."""
    if len(calls) != len(weights):
        raise ValueError(f"{name} has routes of {len(calls)} calls but weights of {len(weights)}")
    return [Route(ids, w) for (ids, _), (w, _) in zip(calls, weights, strict=True)]


# packing


def as_int32(name: str, ids: Tensor) -> Tensor:
    """Raise for ids that do not fit; on a GPU, where that would wait, they stay too high or too low."""
    if ids.dtype != torch.int64:
        return ids.int()
    limits = torch.iinfo(torch.int32)
    if (ids.is_cpu or settings.debug) and ids.numel():
        least, most = ids.min(), ids.max()
        if least < limits.min or most > limits.max:
            raise ValueError(f"{name} has ids {least} to {most}, but ids must fit int32")
    return ids.clamp(limits.min, limits.max).int()


@checked
def pack_routes(
    sequences: list | tuple | Tensor, *, lengths: list | None = None, mask: Tensor | None = None,  # type: ignore[type-arg]
    shape: tuple | None = None, dtype: str = "int32", layers_first: bool = False,  # type: ignore[type-arg]
) -> Tensor:  # fmt: skip
    """Join the routes of sequences, (tokens, layers, k) each, to those of a batch: (T, layers, k) int32.

    A sequence is an array in any form that `replay_routes` takes, or bytes or base64 of numbers alone: then
    `shape` is (layers, k), and `dtype` the name of the numbers' dtype.  With `layers_first` sequences are
    (layers, tokens, k).  A nested tensor (batch, tokens, layers, k) is the list of its parts.  Routing
    weights, which are floating, are joined likewise: (T, layers, k) float32.

    Without more, sequences follow each other, as in a packed batch.  `lengths` are the numbers of tokens that
    they have there.  `mask` (B, S) bool is True at the tokens of a padded batch, and row b has those of
    sequence b; padding gets the id -1, which drops its choices, and the weight 0.  Engines return no route
    for the last token that they sampled, so a sequence may have one route less than tokens: that token is
    treated as padding.  An array (B, S, layers, k), padded already, needs `mask`, which says where.

    Raises ValueError for other numbers of tokens or sequences, for sequences that differ in layers or k, and
    for ids that do not fit int32: on a GPU, where that would wait, `replay_routes` finds them, or this
    function with MOE_AITER_DEBUG=1.  Raises TypeError for ids beside weights.
    """
    check_flags(layers_first=layers_first)
    check_known("dtype", dtype, DTYPES)
    if shape is not None and not (len(shape) == 2 and all(is_kind(n, int) and n > 0 for n in shape)):
        raise ValueError(f"shape must be (layers, k), but it is {shape}")
    if lengths is not None and not all(is_kind(length, int) for length in lengths):
        raise TypeError(f"lengths must be a list of integers, not {lengths}")
    if lengths is not None and mask is not None:
        raise ValueError("lengths and mask are given: pass one of them")
    if mask is not None:
        check_tensor("mask", mask)
        check_shape("mask", mask, "B", "S")
        if mask.dtype != torch.bool or mask.is_meta:
            raise TypeError(f"mask must be bool and have values, not {mask.dtype} on {mask.device}")
    if isinstance(sequences, Tensor):
        sequences = sequences.unbind() if sequences.is_nested else padded(sequences, mask)
    if not len(sequences):
        raise ValueError("sequences is empty")
    arrays = [array_of(f"sequences[{i}]", s, shape, dtype) for i, s in enumerate(sequences)]
    floats = arrays[0].dtype.is_floating_point
    routes = [numbers(f"sequences[{i}]", array, floats) for i, array in enumerate(arrays)]
    routes = [by_tokens(f"sequences[{i}]", route, layers_first) for i, route in enumerate(routes)]
    routes = [r.float() if floats else as_int32(f"sequences[{i}]", r) for i, r in enumerate(routes)]
    lengths = mask.sum(1).tolist() if mask is not None else lengths
    packed = joined(routes, list(map(len, routes)) if lengths is None else lengths, mask is None)
    if mask is None:
        return packed
    whole = packed.new_full((mask.numel(), *packed.shape[1:]), nothing(packed))
    whole[mask.flatten().to(packed.device)] = packed
    return whole


def padded(batch: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the sequences of a batch (B, S, layers, k), without padding."""
    check_shape("sequences", batch, "B", "S", "layers", "k")
    if mask is None:
        raise ValueError(f"sequences is {tuple(batch.shape)}, a padded batch: pass mask, True at its tokens")
    if mask.shape != batch.shape[:2]:
        raise ValueError(f"sequences is {tuple(batch.shape)} but mask is {tuple(mask.shape)}, (B, S)")
    return [row[m] for row, m in zip(batch, mask.to(batch.device), strict=True)]


def nothing(routes: Tensor) -> int:
    """Return what stands for no route: the id -1, or the weight 0."""
    return 0 if routes.is_floating_point() else -1


def joined(routes: list[Tensor], lengths: list[int], given: bool) -> Tensor:
    if len(lengths) != len(routes):
        what = "lengths has" if given else "mask has rows for"
        raise ValueError(f"{what} {len(lengths)} sequences, but sequences has {len(routes)}")
    first, parts = routes[0], []
    for i, (route, length) in enumerate(zip(routes, lengths, strict=True)):
        if route.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"sequences[{i}] is {tuple(route.shape)} but sequences[0] is {tuple(first.shape)}"
            )
        if length - len(route) not in (0, 1):
            raise ValueError(
                f"sequences[{i}] has the routes of {len(route)} tokens, but lengths or mask {length} tokens"
            )
        parts.append(nn.functional.pad(route, (0, 0, 0, 0, 0, length - len(route)), value=nothing(route)))
    return torch.cat(parts)
