"""Metadata of sharded checkpoints: what torch pickles is read, and nothing else."""

import os
import pathlib
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import pickles
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from moe_aiter.distributed.metadata import DTYPES, METADATA, chunks_overlap, read_metadata

MODULE = "torch.distributed.checkpoint.metadata"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with each dtype, tensors of several shapes, and what is no tensor."""
    names = ["float32", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]
    state = {name: torch.zeros(3, 2, dtype=getattr(torch, name)) for name in names}
    state |= {
        "empty": torch.zeros(0, 5),
        "scalar": torch.ones(()),
        "lr": 0.1,
        "more": {"text": "a", "none": None},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def content(folder) -> Metadata:
    return pickle.loads((folder / METADATA).read_bytes())


def rewrite(folder, metadata, protocol: int = 4) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_pickles_is_read(protocol, saved):
    want = content(saved)
    rewrite(saved, want, protocol)
    got = read_metadata(saved)
    assert got.state_dict_metadata == want.state_dict_metadata and len(want.state_dict_metadata) == 12
    assert {k: (v.relative_path, v.offset, v.length) for k, v in got.storage_data.items()} == {
        k: (v.relative_path, v.offset, v.length) for k, v in want.storage_data.items()
    }


def test_every_dtype_is_known():
    for dtype in DTYPES.values():
        module, name = re.search(rb"c(\w+)\n(\w+)", pickle.dumps(dtype, 2)).groups()
        assert DTYPES[f"{module.decode()}.{name.decode()}"] is dtype


def frame(*lines: bytes) -> bytes:
    return b"\x80\x04" + b"".join(lines) + b"."


def word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module: str, name: str) -> bytes:
    return word(module) + word(name) + b"\x93"


def hostile(mark: pathlib.Path) -> dict[str, bytes]:
    system = named("os", "system")
    argument = word(f"touch {mark}") + b"\x85"
    metadata = named(MODULE, "Metadata")
    plain = pickle.dumps(Metadata({}))[:-1]
    return pickles(mark) | {
        "dotted name": frame(named(MODULE, "os.system"), argument, b"R"),
        "name of a method": frame(named(MODULE, "Metadata.__init__.__globals__")),
        "getattr": frame(named("builtins", "getattr"), system, word("__call__"), b"\x86R", argument, b"R"),
        "an object's attribute": frame(metadata, b")\x81", b"}", word("x"), system, b"s", b"b"),
        "a class that is changed": frame(metadata, b"N}", word("__init__"), system, b"s", b"\x86b"),
        "reconstructor": frame(named("copyreg", "_reconstructor"), system, b"\x85R"),
        "import": frame(named("builtins", "__import__"), word("antigravity"), b"\x85R"),
        "persistent id": frame(word("x"), b"Q"),
        "extension": frame(b"\x82\x01"),
        "NEWOBJ_EX": frame(metadata, b")}\x92"),
        "torch.load": frame(named("torch", "load"), word(str(mark)), b"\x85R"),
        "behind good metadata": plain + b"0" + system + argument + b"R.",
        "a huge index": frame(b"]r\xff\xff\xff\xff"),
        "a huge text": frame(b"\x8d" + b"\xff" * 7 + b"\x0fabc"),
        "nothing": b"",
        "no end": frame(b"(" * 1000)[:-1],
        "empty stack": frame(b"t"),
        "unknown memo": frame(b"h\x07"),
        "a list as key": frame(b"}]Ns"),
        "numbers as keys": frame(b"}K\x01K\x02s"),
        "deep": frame(b"]" * 10**5 + b"a" * (10**5 - 1)),
        "itself": frame(b"]\x94h\x00a"),
    }


def test_hostile_pickles_are_refused_in_one_line(saved):
    mark = saved / "mark"
    for name, data in hostile(mark).items():
        (saved / METADATA).write_bytes(data)
        with pytest.raises(ValueError, match="is not the metadata of a sharded checkpoint: ") as caught:
            read_metadata(saved)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, name
        assert not mark.exists(), name


def test_what_is_refused_is_named(saved):
    (saved / METADATA).write_bytes(hostile(saved / "mark")["global"])
    with pytest.raises(ValueError, match=r"its pickle names 'os.system', which is not run"):
        read_metadata(saved)


def test_flipped_bits_are_errors_of_one_kind(saved):
    """Or of a text that nobody needs; nothing else is raised."""
    data = bytearray((saved / METADATA).read_bytes())
    for bit in range(0, 8 * len(data), 41):
        data[bit // 8] ^= 1 << bit % 8
        (saved / METADATA).write_bytes(data)
        try:
            read_metadata(saved)
        except (ValueError, OSError) as error:
            assert "\n" not in str(error)
        data[bit // 8] ^= 1 << bit % 8


def place_of(metadata, name):
    return next(v for k, v in metadata.storage_data.items() if k.fqn == name)


def chunks_of(metadata, name):
    return metadata.state_dict_metadata[name].chunks


def shared(metadata):
    metadata.state_dict_metadata["int64"].chunks = chunks_of(metadata, "float32")


def twice(metadata):
    """The upper two rows of three, and an upper one again: as many numbers as the tensor has."""
    parts = [(torch.Size([0, 0]), torch.Size([2, 2])), (torch.Size([0, 0]), torch.Size([1, 2]))]
    chunks_of(metadata, "int64")[:] = [ChunkStorageMetadata(*part) for part in parts]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "../secret"), "in a file out of the folder"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "/etc/passwd"), "in a file out of the folder"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "a\0b"), "in a file out of the folder"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "\ud800"), "in a file out of the folder"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", 3), "in a file out of the folder"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "none.distcp"), "No such file"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "link"), "is a link out of the folder, to /"),
        (lambda m: setattr(place_of(m, "lr"), "relative_path", "pipe"), "it is a pipe, not a plain file"),
        (lambda m: setattr(place_of(m, "lr"), "offset", -1), "there is a negative or a huge number"),
        (lambda m: setattr(place_of(m, "lr"), "length", 10**7), "__0_0.distcp ends before 'lr'"),
        (lambda m: setattr(place_of(m, "lr"), "length", 2**63), "there is a negative or a huge number"),
        (lambda m: setattr(place_of(m, "lr"), "offset", 1.0), "its pickle has the instruction BINFLOAT"),
        (lambda m: setattr(place_of(m, "lr"), "transform_descriptors", ["zstd"]), "a part is compressed"),
        (lambda m: setattr(m, "storage_data", None), "there is a NoneType, where a dict should be"),
        (lambda m: setattr(m, "state_dict_metadata", []), "there is a list, where a dict should be"),
        (lambda m: m.state_dict_metadata.update(x=m.state_dict_metadata), "there is a dict, where a Record"),
        (lambda m: chunks_of(m, "float32").clear(), "the chunks of a tensor do not make it up"),
        (lambda m: setattr(chunks_of(m, "int64")[0], "offsets", torch.Size([1, 0])), "a chunk is not within"),
        (lambda m: setattr(chunks_of(m, "int64")[0], "sizes", torch.Size([6])), "is shorter|is longer"),
        (shared, "two tensors have one list of chunks"),
        (twice, "two chunks of a tensor overlap"),
    ],
)  # fmt: skip
def test_fields_that_are_not_those_of_a_checkpoint(change, message, saved):
    (saved.parent / "secret").write_bytes(bytes(10**5))
    (saved / "link").symlink_to("../secret")
    os.mkfifo(saved / "pipe")
    metadata = content(saved)
    change(metadata)
    rewrite(saved, metadata)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        read_metadata(saved)
    assert "\n" not in str(caught.value)


def test_chunks_overlap_only_if_they_share_an_element():
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(300):
        dims = int(torch.randint(1, 4, (), generator=generator))
        drawn = torch.randint(0, 4, (3, 2, dims), generator=generator).tolist()
        counts = torch.zeros([8] * dims)
        for offsets, sizes in drawn:
            counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        chunks = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in drawn]
        assert chunks_overlap(chunks) == bool((counts > 1).any())
        seen.add(chunks_overlap(chunks))
    assert seen == {True, False}
