"""`python -m mgpurun.run`: the launcher, with torchrun's command lines (`python -m torch.distributed.run`).

    python -m mgpurun.run --nproc-per-node 2 train.py

Scripts run with this Python. The program `mgpurun` is the same launcher, and runs scripts with the `python3` in PATH.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn, Optional, Sequence


def find_launcher() -> str:
    """The path of the launcher: MGPURUN, or the program of this package, or the one in PATH."""
    named = os.environ.get("MGPURUN")
    if named:
        return named
    try:
        files = importlib.metadata.files("mgpurun") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "mgpurun" and path.parent.name == "bin" and os.access(path, os.X_OK):
            return str(path)
    in_path = shutil.which("mgpurun")
    if in_path is None:
        sys.exit("mgpurun.run: the program mgpurun is neither in this package nor in PATH; reinstall the package")
    return in_path


def main(arguments: Optional[Sequence[str]] = None) -> NoReturn:
    """Becomes the launcher."""
    launcher = find_launcher()
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    words = sys.argv[1:] if arguments is None else list(arguments)
    os.execv(launcher, [launcher, *words])


if __name__ == "__main__":
    main()
