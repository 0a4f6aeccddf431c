"""Run a script, and end its process at once.

With gloo, a thread that frees its last tensor while the interpreter ends aborts the process, in plain torch
too.
"""

import os
import pathlib
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
