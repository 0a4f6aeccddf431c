"""AITER's tuned products: its files, read as they are."""

import logging
import math
import os

import pytest
import torch

from moe_aiter.config import settings
from moe_aiter.tuning import aiter_csv
from moe_aiter.tuning.aiter_csv import (
    COLUMNS,
    Device,
    GemmKey,
    add_rows,
    find_tuned,
    padded_m,
    read,
    read_untuned,
    record,
)

MI300 = Device("gfx942", 304)
HEAD = "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,"
HEAD += "tflops,bw\n"
SEED = """
304,64,4096,4096,0,bf16,bf16,0,0,ASM,0,0,10.2,asm_kernel,0.001,180.5,1200
304,128,4096,4096,0,bf16,bf16,0,0,hipBLASLt,3,0,18.1,hipblaslt_kernel,0.001,385.2,2100
"""
SEED = HEAD + SEED.lstrip()


def problem(M, N=4096, K=4096, **others):
    dtypes = {"bias": False, "dtype": torch.bfloat16, "out_dtype": torch.bfloat16} | others
    return GemmKey(M, N, K, **dtypes)


@pytest.fixture
def given(tmp_path):
    """Write files, and name them all in the setting; they have to be the same afterwards."""
    texts = {}

    def write(*contents):
        for text in contents:
            path = tmp_path / f"{len(texts)}.csv"
            path.write_text(text)
            texts[path] = text
        set_to("config_gemm_bf16", os.pathsep.join(map(str, texts)))
        return list(texts)

    def set_to(name, value):
        before = getattr(settings, name)
        restore.append(lambda: object.__setattr__(settings, name, before))
        object.__setattr__(settings, name, value)
        find_tuned.cache_clear()

    restore = []
    write.set_to = set_to
    yield write
    for undo in reversed(restore):
        undo()
    find_tuned.cache_clear()
    assert all(path.read_text() == text for path, text in texts.items()), "a user's file was written to"
    assert set(tmp_path.iterdir()) >= set(texts)


def test_the_page_s_file_is_read_as_it_is(given):
    given(SEED)
    row = find_tuned(problem(64), MI300)
    assert (row.libtype, row.us, row.device) == ("asm", 10.2, Device("", 304))
    expected = {"libtype": "asm", "solidx": 0, "splitK": 0, "us": 10.2, "kernelName": "asm_kernel"}
    assert row.config() == expected | {"err_ratio": 0.001, "tflops": 180.5, "bw": 1200}
    assert find_tuned(problem(128), MI300).libtype == "hipblaslt"
    for other in (problem(64, bias=True), problem(64, K=512), problem(64, out_dtype=torch.float32)):
        assert find_tuned(other, MI300) is None
    assert find_tuned(problem(64, dtype=torch.float16), MI300) is None
    assert find_tuned(problem(64, scaled=True), MI300) is None
    assert find_tuned(problem(64, shuffled=True), MI300) is None


def test_without_files_there_are_no_rows(given):
    given.set_to("config_gemm_bf16", "")
    assert find_tuned(problem(64), MI300) is None


@pytest.mark.parametrize(
    "cells",
    [
        "304,64,4096,4096,False,torch.bfloat16,torch.bfloat16,False,False,ASM",
        "304,64,4096,4096,FALSE,bfloat16,BF16,false,0,asm",
        " 304, 64, 4096, 4096, 0, bf16, bf16, 0, 0, Asm ",
    ],
)
def test_bools_dtypes_and_names_of_libraries_in_all_their_spellings(given, cells):
    given(HEAD + cells + ",0,0,1.5,k,0,0,0\n")
    assert find_tuned(problem(64), MI300).libtype == "asm"


def test_a_column_of_the_architecture_is_read_where_there_is_one(given):
    text = (
        "gfx,"
        + HEAD
        + "".join(
            f"{gfx},304,64,4096,4096,0,bf16,bf16,0,0,{lib},0,0,9,k,0,0,0\n"
            for gfx, lib in (("gfx942", "asm"), ("gfx950", "triton"))
        )
    )
    given(text)
    assert find_tuned(problem(64), MI300).libtype == "asm"
    assert find_tuned(problem(64), Device("gfx950", 304)).libtype == "triton"
    assert find_tuned(problem(64), Device("gfx950", 256)) is None


def test_columns_in_another_order_and_columns_more_are_taken(given):
    given("us,provenance,libtype,bpreshuffle,scaleAB,outdtype,dtype,bias,K,N,M,cu_num\n"
          "7,today,torch,0,0,fp32,fp16,1,32,16,8,304\n\n")  # fmt: skip
    row = find_tuned(problem(8, 16, 32, bias=True, dtype=torch.float16, out_dtype=torch.float32), MI300)
    assert row.config() == {"us": 7, "provenance": "today", "libtype": "torch"}


@pytest.mark.parametrize(
    "rows, n, level, expected",
    [
        (1, 64, 0, 16), (16, 64, 0, 16), (17, 64, 0, 32), (256, 64, 0, 256), (257, 64, 0, 288),
        (1024, 64, 0, 1024), (1025, 64, 0, 1088), (4097, 64, 0, 4224), (0, 64, 0, 0),
        (5, 64, 1, 8), (8193, 64, 1, 16384), (8193, 4096, 1, 16384), (8193, 4097, 1, 8192),
        (8192, 8192, 1, 8192),
    ],
)  # fmt: skip
def test_padded(rows, n, level, expected):
    assert padded_m(rows, n, level) == expected


def test_rows_are_found_by_their_own_m_then_by_the_two_paddings(given):
    rows = "".join(f"304,{M},4096,4096,0,bf16,bf16,0,0,{lib},0,0,9,k,0,0,0\n"
                   for M, lib in ((40, "torch"), (48, "asm"), (64, "triton"), (8192, "opus")))  # fmt: skip
    given(HEAD + rows)
    found = {M: find_tuned(problem(M), MI300) for M in (40, 41, 48, 49, 60, 33, 65, 8000)}
    libs = {M: row and row.libtype for M, row in found.items()}
    # 49 -> 64; 33 -> 48; 65 -> 80, 128: none; 8000 -> 8064, 8192
    assert libs == {
        40: "torch",
        41: "asm",
        48: "asm",
        49: "triton",
        60: "triton",
        33: "asm",
        65: None,
        8000: "opus",
    }


def test_of_several_rows_the_fastest_counts_with_one_warning(given, caplog):
    def rows(lib, *us):
        cells = "304,{},4096,4096,0,bf16,bf16,0,0,{},0,0,{},k,0,0,0\n"
        return HEAD + "".join(cells.format(64 * (i + 1), lib, t) for i, t in enumerate(us))

    given(rows("torch", 5, 7, 3), rows("asm", 6, 4, 3))
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        libs = [find_tuned(problem(M), MI300).libtype for M in (64, 128, 192)]
    assert libs == ["torch", "asm", "asm"], "the lower time, and the later path where they are the same"
    (warning,) = caplog.messages
    assert "3 tuned products have several rows" in warning


def test_the_same_row_twice_is_no_reason_to_warn(given, caplog):
    given(SEED, SEED)
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        assert find_tuned(problem(64), MI300)
    assert not caplog.messages


def test_missing_paths_are_left_out_and_logged(given, caplog, tmp_path):
    (path,) = given(SEED)
    given.set_to("config_gemm_bf16", os.pathsep.join([str(tmp_path / "gone.csv"), str(path), ""]))
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        assert find_tuned(problem(64), MI300)
    assert any("gone.csv: it is left out" in message for message in caplog.messages)


def test_several_paths_of_which_none_is_there_are_an_error(given, tmp_path):
    given.set_to("config_gemm_bf16", os.pathsep.join([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]))
    with pytest.raises(FileNotFoundError, match=r"a.csv.*b.csv"):
        find_tuned(problem(64), MI300)


def test_one_path_that_is_not_there_is_no_rows(given, tmp_path):
    given.set_to("config_gemm_bf16", str(tmp_path / "a.csv"))
    assert find_tuned(problem(64), MI300) is None


def test_rows_of_other_devices_do_not_count_and_are_logged(given, caplog):
    given(SEED)
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        assert find_tuned(problem(64), Device("sm90", 132)) is None
    assert any(
        "2 of 2 rows are of other devices than this one, sm90 with 132 units" in m for m in caplog.messages
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: there are no columns cu_num, M"),
        (HEAD.replace("bias,", ""), "line 1: there are no columns bias"),
        (SEED.replace("304,128", "304,12x"), "line 3: M is '12x'; it must be a whole number"),
        (SEED.replace("128,4096", "-8,4096"), "line 3: M is '-8'"),
        (SEED.replace("ASM", ""), "line 2: libtype is empty"),
        (SEED.replace(",10.2,", ",fast,"), "line 2: us is 'fast'; it must be a number"),
        *(
            (
                SEED.replace(",10.2,", f",{text},"),
                f"line 2: us is '{text.strip()}'; it must be a number, 0 or more",
            )
            for text in ("nan", "inf", "-inf", "1e999", "-1", "", "  ", "1_0", "1 0", "0x10", "1e")
        ),
        *(
            (
                SEED.replace("304,128", f"304,{text}"),
                f"line 3: M is '{text.strip()}'; it must be a whole number",
            )
            for text in ("nan", "inf", "", " ", "1.5", "1_0", "6 4", "1e30", "9" * 5000, "\u0663")
        ),
        (
            SEED.replace("304,128", "-304,128"),
            "line 3: cu_num is '-304'; it must be a whole number, 0 or more",
        ),
        (SEED.replace("ASM,0", "ASM,0.5"), "line 2: solidx is '0.5'; it must be a whole number"),
        (SEED.replace("ASM,0,0", "ASM,0,inf"), "line 2: splitK is 'inf'; it must be a whole number"),
        (SEED.replace("180.5", "fast"), "line 2: tflops is 'fast'; it must be a number"),
        (SEED.replace("4096,0,bf16", "4096,2,bf16"), "line 2: bias is '2'; it takes 0, false, 1, true"),
        (SEED.replace("bf16,bf16", "bf17,bf16"), "line 2: dtype is 'bf17'; it takes bfloat16"),
        (SEED.replace(",1200", ""), "line 2: 16 cells under 17 columns"),
        (SEED.replace(",1200", ",1200,1"), "line 2: 18 cells under 17 columns"),
        ("\0\1", "line 1: there are no columns"),
    ],
)
def test_a_mistake_in_a_file_is_an_error_that_names_its_line(given, text, message):
    (path,) = given(text)
    with pytest.raises(ValueError, match=message) as error:
        find_tuned(problem(64), MI300)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "M, us", [("64.0", "1e1"), (" 6.4e1 ", "+10.0"), ("064", "10."), ("+64", " 10 "), ("64", "0")]
)
def test_numbers_in_all_their_spellings(given, M, us):
    """pandas writes whole numbers as 64.0 where another cell of the column was empty."""
    given(SEED.replace("304,64", f"304.0,{M}").replace(",10.2,", f",{us},"))
    row = find_tuned(problem(64), MI300)
    assert row.us == float(us) and row.device == Device("", 304) and row.config()["us"] == float(us)


def test_what_is_unknown_of_a_row_is_nan_and_no_solution_the_first(given):
    given(HEAD + "304,64,4096,4096,0,bf16,bf16,0,0,asm,,-1,9,1e3,nan,,inf\n")
    config = find_tuned(problem(64), MI300).config()
    assert (config["solidx"], config["splitK"], config["kernelName"]) == (0, -1, "1e3"), (
        "a name stays as it is"
    )
    assert all(math.isnan(config[name]) for name in ("err_ratio", "tflops")) and config["bw"] == math.inf


def test_a_file_that_is_no_text_is_an_error(given, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe\x00\xd8")
    given.set_to("config_gemm_bf16", str(path))
    with pytest.raises(ValueError, match=r"x.csv is not a table"):
        find_tuned(problem(64), MI300)


def test_what_is_recorded_is_read_again_and_each_product_is_there_once(given, tmp_path):
    path = tmp_path / "runs" / "untuned.csv"
    given.set_to("tune_gemm", str(path))
    products = [problem(7, bias=True), problem(7), problem(7, 8, 16, dtype=torch.float16, scaled=True)]
    for one in (*products, *products):
        record(one)
    find_tuned.cache_clear()  # as in a new process
    record(products[1])
    assert read_untuned(path) == products
    assert path.read_text().splitlines()[:2] == [
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle",
        "7,4096,4096,True,torch.bfloat16,torch.bfloat16,False,False",
    ]


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_recorded_unless_asked_for(given, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given.set_to("tune_gemm", value)
    record(problem(7))
    assert not list(tmp_path.iterdir())


def test_one_stands_for_aiters_own_name_of_the_file(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given.set_to("tune_gemm", "1")
    record(problem(7))
    assert read_untuned(tmp_path / "bf16_untuned_gemm.csv") == [problem(7)]


def test_rows_are_appended_under_a_file_s_own_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("K,N,M,bias,dtype,outdtype,scaleAB,bpreshuffle,note\n1,2,3,0,bf16,bf16,0,0,mine")
    add_rows(path, [problem(7).cells()], ())
    assert read_untuned(path) == [problem(3, 2, 1), problem(7)]
    with pytest.raises(ValueError, match="there are no columns us"):
        add_rows(path, [{"us": "1"}], ())


def test_our_rows_are_aiters(tmp_path):
    """Its key, by its own spelling of it, and a last column that it does not know."""
    path = tmp_path / "t.csv"
    cells = {"gfx": "sm90", "cu_num": 132, **problem(7).cells(), "libtype": "triton", "us": "3.1"}
    add_rows(path, [cells], COLUMNS)
    (row,) = read(path)
    assert (row.problem, row.device, row.libtype) == (problem(7), Device("sm90", 132), "triton")
    assert path.read_text().startswith(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,"
    )
    assert ",False,torch.bfloat16,torch.bfloat16,False,False,triton," in path.read_text()


def test_this_device_is_named_as_rows_are():
    assert aiter_csv.this_device(torch.device("cpu")) == Device("cpu", torch.get_num_threads())


@pytest.mark.gpu
def test_a_gpu_is_named_by_its_architecture_and_units():
    gfx, units = aiter_csv.this_device(torch.device("cuda", 0))
    assert gfx.startswith(("sm", "gfx")) and units > 1
