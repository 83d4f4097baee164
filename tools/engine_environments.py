"""Environments with the engines that the adapters are for, outside .venv, and their tests.

`python -m tools.engine_environments [verl skyrl verifiers letta deepeval ...]` makes each
environment where it is missing, below build/integrations or the folder that MEMCALIB_ENGINES
names, installs the released engine and the core of this package, and runs
`tests/products/integrations/engines` there.
`oldest` and `newest` are the core alone at both ends of the ranges of openai and rich. With
MEMCALIB_ENGINES_AS_THEY_ARE=1 nothing is installed.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "products" / "integrations" / "engines"
TORCH = "torch==2.13.0"
TOOLS = ("pytest>=9", "pytest-timeout>=2.4", "pysbd>=0.3.4,<0.4")


@dataclass(frozen=True)
class Engine:
    """An environment: what is installed, in this order, and which tests run in it."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    local: tuple[str, ...] = ()  # further packages of this repository
    # whether pip must keep the packages as they are when it adds ours; where both ask for other
    # versions of a third, ours comes second
    resolves: bool = True
    node: tuple[str, ...] = ()  # packages of npm, in the same folder


ENGINES = {
    "verl": Engine(
        (TORCH, "verl==0.9.1", "cachetools", "TransferQueue==0.1.11", "uvicorn", "fastapi"),
        ("test_verl.py",),
    ),
    # SkyRL's extra brings flash-attn and nixl, which need CUDA: these are the ones for a CPU.
    "skyrl": Engine(
        (
            TORCH,
            "skyrl==0.3.0",
            "skyrl-gym==0.4.0",
            "ray",
            "loguru",
            "cloudpickle",
            "omegaconf",
            "hydra-core",
            "torchdata",
            "peft==0.18.1",
            "transformers==5.8.0",
        ),
        ("test_skyrl.py",),
    ),
    "verifiers": Engine(
        (TORCH, "verifiers==0.4.0", "transformers", "uv"),
        ("test_verifiers.py",),
        local=("packages/memcalib-env",),
    ),
    "oldest": Engine(("openai==2.54.0", "rich==13.9.0", "hypothesis>=6"), ("test_ranges.py",)),
    "letta": Engine(("letta-evals==0.26.0",), ("test_letta.py",)),
    # DeepEval wants click below 8.4, huggingface_hub 8.4 and above
    "deepeval": Engine(("deepeval==4.3.1",), ("test_deepeval.py",), resolves=False),
    "promptfoo": Engine((), ("test_promptfoo.py",), node=("promptfoo@0.121.20",)),
    "newest": Engine(("openai>=3,<4", "rich>=15,<16", "hypothesis>=6"), ("test_ranges.py",)),
}


def folder_of(name: str) -> Path:
    return Path(os.environ.get("MEMCALIB_ENGINES", ROOT / "build" / "integrations")) / name


def pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*map(str, command), *arguments], check=True)


def npm(folder: Path, *packages: str) -> None:
    """Installs packages of npm, whose own install steps, which fetch binaries, are not run."""
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund"]
    subprocess.run([*command, "--ignore-scripts", "--silent", *packages], check=True)


def prepare(name: str) -> Path:
    """The Python of an environment, made where it is missing."""
    engine = ENGINES[name]
    folder = folder_of(name)
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if not ready.exists() and os.environ.get("MEMCALIB_ENGINES_AS_THEY_ARE") != "1":
        pip(python, *engine.packages, *TOOLS)
        kept = engine.packages if engine.resolves else ()
        pip(python, *kept, "--editable", str(ROOT))
        if engine.node:
            npm(folder, *engine.node)
        for path in engine.local:
            pip(python, "--no-deps", str(ROOT / path))
        ready.touch()
    return python


def run(name: str) -> int:
    """The exit code of an environment's tests."""
    python = prepare(name)
    tests = [str(TESTS / test) for test in ENGINES[name].tests]
    command = [python, "-m", "pytest", "-q", "-c", ROOT / "pytest.ini", "--rootdir", ROOT]
    options = ["-o", "timeout=1800", "-p", "no:cacheprovider", "--noconftest", "-W", "ignore"]
    path = f"{ROOT}:{TESTS}:{ROOT / 'tests' / 'helpers'}"
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    print(f"== {name}: {folder_of(name)}", flush=True)
    return subprocess.run([*map(str, command), *options, *tests], env=environment).returncode


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise SystemExit(f"{unknown[0]}: no such environment; allowed: {', '.join(ENGINES)}")
    codes = {name: run(name) for name in names or ENGINES}
    failed = [name for name, code in codes.items() if code]
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
