"""Makes the models that engines are tested with. Run in an environment with torch and transformers, without a network.

`python models.py tiny FOLDER` makes a random Llama with a tokenizer trained on the spot: small, and deterministic.
`python models.py convert GGUF FOLDER` makes a real model's plain checkpoint out of its quantised file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
VOCABULARY = 1024
NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "dtype", "transformers_version")
"""Keys of a converted configuration that tell of the file it came from."""


def make_tiny(folder: Path) -> None:
    """A grouped-query Llama of random weights. They are spread wide, so that greedy output varies with the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **SPECIAL).save_pretrained(folder)


def _tokenizer() -> Tokenizer:
    """Byte-level pairs learnt from a few sentences; any text can be encoded."""
    sentences = ("a page holds the keys and values of {} tokens", "request {} asks for what earlier ones have computed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.format(i) for i in range(500) for text in sentences), trainer)
    return tokenizer


def convert(source: Path, folder: Path) -> None:
    """A checkpoint in bfloat16 of what a quantised file holds, with its tokenizer and chat template.

    Raises:
        SystemExit: weights are missing in the file.
    """
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = {name: value for name, value in read.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    plain = LlamaForCausalLM(LlamaConfig(**config))
    found = plain.load_state_dict({name: value.detach() for name, value in read.state_dict().items()}, strict=False)
    plain.tie_weights()
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"{source.name} has other weights than a Llama: {found}")
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    kind, *rest = sys.argv[1:]
    folder = Path(rest[-1])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "tiny":
        make_tiny(folder)
    else:
        convert(Path(rest[0]), folder)
    print(json.dumps(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    main()
