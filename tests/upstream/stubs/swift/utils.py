"""What `--external_plugins` of ms-swift 4.6.0 calls for each path."""

import importlib.util
import os
import sys


def import_external_file(file_path: str):
    sys.path.insert(0, os.path.dirname(os.path.abspath(file_path)))
    module_name = f"_swift_external_{abs(hash(file_path))}"  # a file by its path: it has no package
    spec = importlib.util.spec_from_file_location(module_name, file_path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
