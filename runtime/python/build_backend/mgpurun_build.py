"""Builds the wheel (PEP 517): the Python files, the C library, the launcher and the programs that `mgpurun doctor --test`
runs. Cargo builds them.

The wheel is tagged with the oldest glibc that its programs need. For wheels that run everywhere, wheels.sh sets MGPU_CARGO, the
command in place of "cargo build", to "cargo zigbuild", and MGPU_TARGET to x86_64-unknown-linux-gnu.2.28 or
aarch64-unknown-linux-gnu.2.28. MGPU_PREBUILT names a folder that has these files already; nothing is built then.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent
LIBRARY = "libmgpu_c.so"
# The launcher, and what `mgpurun doctor --test` runs from the same folder.
PROGRAMS = ("mgpurun", "allreduce_perf", "gpu_check")


def get_requires_for_build_wheel(config_settings: Optional[dict[str, Any]] = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: Optional[dict[str, Any]] = None) -> list[str]:
    return []


def build_sdist(sdist_directory: str, config_settings: Optional[dict[str, Any]] = None) -> str:
    raise NotImplementedError("the package is built from a checkout of the repository: pip install runtime/python")


def build_wheel(
    wheel_directory: str,
    config_settings: Optional[dict[str, Any]] = None,
    metadata_directory: Optional[str] = None,
) -> str:
    version = workspace_version()
    with tempfile.TemporaryDirectory() as folder:
        files = binaries(Path(folder))
        tag = f"py3-none-{platform_tag(list(files.values()))}"
        name = f"mgpurun-{version}-{tag}.whl"
        info = f"mgpurun-{version}.dist-info"
        wheel = Wheel(Path(wheel_directory) / name, f"{info}/RECORD")
        with wheel:
            for source in sorted((HERE / "mgpurun").iterdir()):
                if source.suffix == ".py" or source.name == "py.typed":
                    wheel.add(f"mgpurun/{source.name}", source.read_bytes())
            wheel.add(f"mgpurun/{LIBRARY}", files[LIBRARY].read_bytes(), executable=True)
            for program in PROGRAMS:
                wheel.add(f"mgpurun-{version}.data/scripts/{program}", files[program].read_bytes(), executable=True)
            for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
                wheel.add(f"{info}/licenses/{licence}", (ROOT / licence).read_bytes())
            wheel.add(f"{info}/METADATA", metadata(version).encode())
            wheel.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: mgpurun\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
    return name


class Wheel:
    """A wheel that is being written. Its list of files comes last."""

    def __init__(self, path: Path, record: str) -> None:
        self.path, self.record, self.rows = path, record, []

    def __enter__(self) -> Wheel:
        self.archive = zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED)
        return self

    def __exit__(self, *error: Any) -> None:
        rows = "".join(f"{row}\n" for row in [*self.rows, f"{self.record},,"])
        if error[0] is None:
            self.write(self.record, rows.encode(), 0o644)
        self.archive.close()

    def add(self, name: str, content: bytes, executable: bool = False) -> None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.rows.append(f"{name},sha256={digest},{len(content)}")
        self.write(name, content, 0o755 if executable else 0o644)

    def write(self, name: str, content: bytes, mode: int) -> None:
        # The same files give the same bytes.
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        entry.external_attr = (stat.S_IFREG | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self.archive.writestr(entry, content)


def workspace_version() -> str:
    text = (ROOT / "Cargo.toml").read_text()
    section = text.partition("[workspace.package]")[2].partition("\n[")[0]
    found = re.search(r'^version = "([^"]+)"', section, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{ROOT / 'Cargo.toml'} has no version in [workspace.package]")
    return found[1]


def metadata(version: str) -> str:
    project = (HERE / "pyproject.toml").read_text()

    def field(name: str) -> str:
        found = re.search(rf'^{name} = "(.+)"$', project, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"pyproject.toml has no {name}")
        return found[1]

    lines = [
        "Metadata-Version: 2.1",
        "Name: mgpurun",
        f"Version: {version}",
        f"Summary: {field('description')}",
        f"Requires-Python: {field('requires-python')}",
        "License: MIT OR Apache-2.0",
        "Description-Content-Type: text/markdown",
        "",
        (HERE / "README.md").read_text(),
    ]
    return "\n".join(lines)


def binaries(folder: Path) -> dict[str, Path]:
    """Builds programs and library, and returns copies of them, by name, without debugging symbols."""
    prebuilt = os.environ.get("MGPU_PREBUILT")
    built = Path(prebuilt) if prebuilt else build()
    copies = {}
    for name in (*PROGRAMS, LIBRARY):
        copies[name] = Path(shutil.copy2(built / name, folder / name))
        if shutil.which("strip") and not os.environ.get("MGPU_TARGET"):
            subprocess.run(["strip", "--strip-unneeded", str(copies[name])], check=True)
    return copies


def build() -> Path:
    cargo = shlex.split(os.environ.get("MGPU_CARGO", "cargo build"))
    target = os.environ.get("MGPU_TARGET")
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    command = [*cargo, "--release", "--locked", "--manifest-path", str(ROOT / "Cargo.toml")]
    command += ["--package", "mgpurun", "--package", "mgpu-c", "--package", "mgpu-examples", "--lib"]
    command += [word for program in PROGRAMS for word in ("--bin", program)]
    command += ["--target-dir", str(folder)]
    environment = dict(os.environ)
    if target:
        command += ["--target", target]
        # This machine's strip may not know the target's files.
        environment["CARGO_PROFILE_RELEASE_STRIP"] = "symbols"
    try:
        subprocess.run(command, check=True, env=environment)
    except FileNotFoundError as error:
        raise RuntimeError("cargo is not in PATH: install Rust from https://rustup.rs") from error
    # cargo-zigbuild's targets end with the version of glibc.
    triple = re.sub(r"\.\d+\.\d+$", "", target) if target else ""
    return folder / triple / "release"


def platform_tag(files: list[Path]) -> str:
    """The tag of wheels for machines with at least the glibc that `files` need."""
    content = b"".join(file.read_bytes() for file in files)
    newest = max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content)), default=17)
    # ELF's e_machine.
    machine = int.from_bytes(files[0].read_bytes()[18:20], "little")
    architecture = {62: "x86_64", 183: "aarch64"}.get(machine)
    if architecture is None:
        raise RuntimeError(f"{files[0].name} is for a machine of number {machine}, which has no wheels")
    return f"manylinux_2_{max(newest, 17)}_{architecture}"
