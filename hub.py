"""Write the package as a kernel for Hugging Face's `kernels`: `python hub.py build/hub`, or `make hub`.

    build/hub/build/torch-cpu/      the modules, and metadata.json; no C++ extension
    build/hub/build/torch-cuda/     the same for each backend
    build/hub/build/torch-rocm/

`kernels` imports a variant by the `id` in its metadata.json, not as `moe_aiter`.  The ops then are
`torch.ops.<id>`, so several versions can be loaded in one process, beside an installed moe_aiter.
https://huggingface.co/docs/kernels/kernel-requirements describes the form.
"""

import base64
import hashlib
import json
import pathlib
import shutil
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent / "moe_aiter"
# these import other packages, which `kernels` does not allow, or serve the command line or older names
LEFT_OUT = {"__main__.py", "backend.py", "bench", "cli.py", "compat", "integrations", "training.py"}
ARCHS = {"cpu": None, "cuda": ["8.0+PTX"], "rocm": ["gfx942", "gfx950"]}  # "8.0+PTX": 8.0 and newer
NAME = "moe_aiter"
# `kernels` before 0.11.7 imports this folder of a variant
INNER = """import importlib.util
import pathlib
import sys

if {id!r} not in sys.modules:
    path = pathlib.Path(__file__).parents[1] / "__init__.py"
    spec = importlib.util.spec_from_file_location({id!r}, path)
    sys.modules[{id!r}] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[{id!r}])
kernel = vars(sys.modules[{id!r}])
__all__, __getattr__ = kernel["__all__"], kernel["__getattr__"]
"""


def write(target: pathlib.Path) -> list[pathlib.Path]:
    """Write a variant for each backend to `target`/build, which is replaced; returns their folders."""
    shutil.rmtree(target / "build", ignore_errors=True)
    return [write_variant(target / "build" / f"torch-{backend}", backend) for backend in ARCHS]


def write_variant(folder: pathlib.Path, backend: str) -> pathlib.Path:
    for path in sorted(PACKAGE.rglob("*")):
        place = path.relative_to(PACKAGE)
        if path.suffix in (".py", ".csv") and place.parts[0] not in LEFT_OUT:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / place)
    unique = hashlib.sha256(json.dumps(hashes(folder)).encode()).hexdigest()[:8]
    kernel = f"_{NAME}_{backend}_{unique}"
    (folder / NAME).mkdir()
    (folder / NAME / "__init__.py").write_text(INNER.format(id=kernel), encoding="utf-8")
    metadata = {
        "name": NAME.replace("_", "-"),
        "id": kernel,
        "version": major_version(),
        "license": "mit",
        "python-depends": ["einops"],
        "backend": {"type": backend} | ({"archs": ARCHS[backend]} if ARCHS[backend] else {}),
        "digest": {"algorithm": "sha256", "files": hashes(folder)},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def hashes(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files}
    return {name: base64.b64encode(digest).decode() for name, digest in sums.items()}


def major_version() -> int:
    """Return the first number of the package's version: 0 stands for an interface that may still change."""
    source = (PACKAGE / "config.py").read_text(encoding="utf-8")
    return int(source.partition('VERSION = "')[2].partition(".")[0])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python hub.py FOLDER")
    for variant in write(pathlib.Path(sys.argv[1])):
        print(variant)
