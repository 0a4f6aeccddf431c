"""The house rules that a machine can check.  To change a cap, change it here and say why in the commit."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

import moe_aiter

REPOSITORY = pathlib.Path(__file__).parent.parent
ROOT = REPOSITORY / "moe_aiter"
FILES = sorted(ROOT.rglob("*.py"))
BENCHMARKS = sorted(REPOSITORY.glob("benchmarks/*.py"))  # outside of the package
EXAMPLE = sorted(REPOSITORY.glob("examples/language_model/*.py"))
TEST_FILES = sorted([*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("examples/*/tests/**/*.py")])
SOURCES = sorted(REPOSITORY.glob("csrc/*"))
LEVELS = [
    ["config", "files", "private_api", "torch_ops"],
    ["invariance", "replay"],
    ["op"],
    ["backend", "derived", "tuning"],
    ["switches"],
    ["kernels"],
    ["routing"],
    ["layers"],
    ["distributed", "optim"],
    ["integrations"],
    ["bench"],
    ["compat", "cli"],
    ["training"],
]
WINGS = [
    ["base"],
    ["rows", "quantize", "sparse"],
    ["hopper"],
    ["grouped"],
    ["dense"],
    ["experts"],
]  # of kernels/
WING = {wing: i for i, wings in enumerate(WINGS) for wing in wings}
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
EXTENSION = "_host"
INSIDES = {"triton.compiler", "triton.runtime.jit", "triton.knobs"}  # of Triton, without an underscore
# not torch's nor Triton's: named tuples', transformers', PEFT's, torchtitan's and our own
OTHERS = {"_asdict", "_fields", "_replace"}
OTHERS |= {"_activate_lora", "_apply_gate", "_experts_implementation", "_global_mapping", "_parallelized"}
OTHERS |= {EXTENSION, "_preshuffled_layout", "_exit"}  # os._exit is documented
FILE_LINES = 700
FUNCTION_LINES = 60
ARGUMENTS = 8  # by position; a keyword-only one is named wherever it is passed
OP_ARGUMENTS = 12  # in kernels/: the schema of an op is flat, the bundles of tensors stop above it
KERNEL_ARGUMENTS = 30


def name(path):
    return path.relative_to(REPOSITORY).as_posix()


def every(paths):
    """A rule for each of these files, as one test that names all files that break it."""

    def decorate(rule):
        @functools.wraps(rule)
        def test():
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{name(path)}: {error}")
            assert not broken, "\n".join(broken)

        del test.__wrapped__  # pytest would ask for a fixture called path
        return test

    return decorate


every_file = every(FILES)


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


@functools.cache
def walked(path):
    return list(ast.walk(tree(path)))


def nodes(path, *kinds):
    return [node for node in walked(path) if isinstance(node, kinds)]


def functions(path):
    return nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)


def is_kernel(fn):
    return any("jit" in ast.unparse(decorator) for decorator in fn.decorator_list)


def imports(path):
    """(room, names) of each import from inside the package; no names for a plain import."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            modules = [(a.name, []) for a in node.names]
        elif not node.level:
            modules = [(node.module, [a.name for a in node.names])]
        else:
            base = ".".join(("moe_aiter", *here[: len(here) - node.level]))
            if node.module:
                modules = [(f"{base}.{node.module}", [a.name for a in node.names])]
            else:
                modules = [(f"{base}.{a.name}", []) for a in node.names]
        for module, names in modules:
            package, _, rest = module.partition(".")
            if package == "moe_aiter":
                yield tuple(rest.split(".")) if rest else (), names


@every(FILES + BENCHMARKS + EXAMPLE + TEST_FILES + SOURCES)
def test_file_length(path):
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{lines} lines"


@every(FILES + BENCHMARKS + EXAMPLE)
def test_function_size(path):
    for fn in functions(path):
        count = len(fn.args.posonlyargs + fn.args.args)
        count -= bool(fn.args.args) and fn.args.args[0].arg in ("self", "cls", "ctx")
        cap = OP_ARGUMENTS if ROOT / "kernels" in path.parents else ARGUMENTS
        cap = KERNEL_ARGUMENTS if is_kernel(fn) else cap
        assert count <= cap, f"{fn.name} takes {count} arguments"
        # a kernel's signature has a line for each argument and its shape: the body counts
        lines = fn.end_lineno - (fn.body[0] if is_kernel(fn) else fn).lineno + 1
        assert lines <= FUNCTION_LINES, f"{fn.name} has {lines} lines"


@every_file
def test_nothing_is_imported_from_outside_of_the_package(path):
    for node in nodes(path, ast.Import, ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        assert not any(module.partition(".")[0] == "benchmarks" for module in modules), f"line {node.lineno}"


@every_file
def test_imports_point_down(path):
    here = path.relative_to(ROOT).with_suffix("").parts[0]
    if here in ("__init__", "__main__"):
        return  # the doors stand above every room
    for room, names in imports(path):
        for target in [room[0]] if room else names:
            if target == EXTENSION:
                continue
            assert target in LEVEL, f"{target!r} has no level"
            assert target == here or LEVEL[target] < LEVEL[here], f"{here} imports {target}"


@every_file
def test_wings_point_down(path):
    """No wing of kernels/ imports from one above or beside."""
    if path.parent.parent != ROOT / "kernels":
        return
    here = path.parent.name
    for room, names in imports(path):
        for target in room[1:2] or names if room[:1] == ("kernels",) else []:
            assert target == here or WING[target] < WING[here], f"{here} imports {target}"


@every_file
def test_only_config_reads_the_environment(path):
    readers = {"environ", "getenv", "environb"}
    used = {n.attr for n in nodes(path, ast.Attribute)} | {n.id for n in nodes(path, ast.Name)}
    assert path.stem == "config" or not used & readers


@every(FILES + EXAMPLE)
def test_private_names_stand_in_one_file(path):
    """bench/ may use them too: no product depends on it."""
    if path == ROOT / "private_api.py" or ROOT / "bench" in path.parents:
        return
    used = [(ast.unparse(node.value), node.attr) for node in nodes(path, ast.Attribute)]
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if not getattr(node, "level", 0):
            module = [node.module] if isinstance(node, ast.ImportFrom) else []
            names = [".".join([*module, alias.name]).split(".") for alias in node.names]
            used += [(".".join(parts[:i]), parts[i]) for parts in names for i in range(1, len(parts))]
    for owner, last in used:
        private = last.startswith("_") and not last.endswith("__") and last not in OTHERS
        assert not private or owner in ("self", "cls", "super()"), f"{owner}.{last}"
        assert f"{owner}.{last}" not in INSIDES, f"{owner}.{last}"


@every_file
def test_only_kernels_hold_kernels(path):
    assert ROOT / "kernels" in path.parents or not any(is_kernel(fn) for fn in functions(path))


def added_to(statement):
    """The accumulator of a product: `acc` of `acc = tl.dot(x, y, acc)` and of `acc += tl.dot(x, y)`."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call) or "dot" not in ast.unparse(value.func):
        return None
    if isinstance(statement, ast.AugAssign):
        return ast.unparse(statement.target)
    names = [ast.unparse(arg) for arg in [*value.args, *(k.value for k in value.keywords)]]
    return next((t for t in map(ast.unparse, getattr(statement, "targets", ())) if t in names), None)


def chained(source):
    """The accumulators that two products in a row of one loop add to."""
    for loop in ast.walk(source):
        if isinstance(loop, (ast.For, ast.While)):
            for block in (getattr(node, "body", None) for node in ast.walk(loop)):
                added = [added_to(s) for s in block] if isinstance(block, list) else []
                yield from {acc for acc in added if acc and added.count(acc) > 1}


@every([p for p in FILES if ROOT / "kernels" in p.parents])
def test_no_accumulator_is_that_of_two_products(path):
    # Triton 3.6 and 3.7 miscompile it for sm_100: triton#10821
    assert not list(chained(tree(path)))


def test_two_products_in_a_row_are_found():
    loop = "for k in range(n):\n    acc = tl.dot(x, y, acc)\n    {} tl.dot(z, y{})"
    found = [list(chained(ast.parse(loop.format(*words)))) for words in (("acc =", ", acc"), ("acc +=", ""))]
    assert found == [["acc"], ["acc"]] and not list(chained(ast.parse(loop.format("b =", ", b"))))


@every_file
def test_only_one_file_imports_the_extension(path):
    found = [room for room, names in imports(path) if EXTENSION in (room[:1] or tuple(names))]
    assert not found or path == ROOT / "kernels" / "base" / "host.py"


@every(FILES + EXAMPLE + TEST_FILES)
def test_nothing_is_swallowed_or_star_imported(path):
    for handler in nodes(path, ast.ExceptHandler):
        caught = ast.unparse(handler.type) if handler.type else "everything"
        assert caught not in ("everything", "Exception", "BaseException"), f"line {handler.lineno}"
    for node in nodes(path, ast.ImportFrom):
        assert node.names[0].name != "*", f"line {node.lineno}"


WAITS = {"item", "tolist", "cpu", "nonzero", "numpy", "synchronize"}
REDUCTIONS = {"all", "any", "equal", "max", "min", "sum"}  # which wait where a Python number is made of them


def calls_method(node, names):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", None) in names


def is_wait(node):
    """Whether it is `x.item()` or the like, `if x.any()`, or `int(x.max())`."""
    read = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("bool", "int", "float"):
        read = node.args
    return calls_method(node, WAITS) or any(calls_method(n, REDUCTIONS) for r in read for n in ast.walk(r))


def waiting(source):
    """The launchers of a file that wait for the device.

    They are `launch*`, `bind*`, what `define_op` takes for a GPU, and whatever these use of the file.
    """
    nodes = list(ast.walk(source))
    found = [n for n in nodes if isinstance(n, ast.FunctionDef) and not is_kernel(n)]
    found = [fn for fn in found if not fn.name.endswith(("_host", "_on_cpu"))]
    names = {n.value.id for n in nodes if isinstance(n, ast.keyword) and n.arg in ("triton", "hopper")
             and isinstance(n.value, ast.Name)}  # fmt: skip
    names |= {fn.name for fn in found if fn.name.startswith(("launch", "bind"))}
    used = True
    while used:
        bodies = [n for fn in found if fn.name in names for n in ast.walk(fn)]
        used = {n.id for n in bodies if isinstance(n, ast.Name)} & {fn.name for fn in found} - names
        names |= used
    return {fn.name for fn in found if fn.name in names and any(map(is_wait, ast.walk(fn)))}


@every_file
def test_launchers_never_wait_for_the_device(path):
    assert not waiting(tree(path))


@pytest.mark.parametrize("wait", ["x.item()", "x.tolist()", "if x.any(): pass", "n = int(x.max())"])
def test_a_launcher_that_waits_is_found(wait):
    """In a launcher, in what binds it, in the launcher that it returns, and in a function that this calls."""
    inner = "def {}(i):\n    def launch(out, i):\n        {}\n    return launch"
    alone = [f"def {name}(i):\n    {wait}" for name in ("launch_up", "bind_up", "count")]
    assert [waiting(ast.parse(source)) for source in alone] == [{"launch_up"}, {"bind_up"}, set()]
    assert waiting(ast.parse(inner.format("bind_up", wait))) == {"bind_up", "launch"}
    assert waiting(ast.parse(f"{alone[2]}\n{inner.format('bind_up', 'count(i)')}")) == {"count"}
    assert waiting(ast.parse(f"{alone[2]}\nop = define_op('up', triton=count)")) == {"count"}


@every([p for p in FILES if p.name == "__init__.py"])
def test_all_is_complete(path):
    """A package that re-exports names lists exactly those."""
    body = list(tree(path).body)
    body += [
        m for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING" for m in n.body
    ]
    names = {a.asname or a.name for n in body if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
    public = {name for name in names if not name.startswith("_")}
    lists = [
        ast.literal_eval(n.value)
        for n in tree(path).body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    if path.parent == ROOT:
        assert lists, "the package's names are one explicit list"
    for names in lists:
        assert len(names) == len(set(names))
        defined = {n.name for n in tree(path).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        assert public <= set(names) <= public | defined | {"__version__"}


def test_every_public_name_has_a_docstring():
    for public in set(moe_aiter.__all__) - {"__version__"}:
        assert (getattr(moe_aiter, public).__doc__ or "").strip(), public


def test_importing_is_silent_and_touches_no_gpu():
    script = (
        "import logging, sys, torch\n"
        "logging.basicConfig(level=0)\n"
        "import moe_aiter\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'transformers', 'matplotlib', 'safetensors', 'moe_aiter.cli'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff(command):
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "."], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
