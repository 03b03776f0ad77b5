"""Makes the models that engines are tested with. Run in an environment with torch and transformers, without a network.

`python models.py tiny FOLDER` makes a random Llama with a tokenizer trained on the spot: small, and deterministic.
`python models.py mla FOLDER` makes a random model with latent attention, like DeepSeek's.
`python models.py vision FOLDER` makes a random model that looks at an image in front of the text.
`python models.py lora SEED FOLDER` makes a random adapter of the random Llama.
`python models.py convert GGUF FOLDER` makes a real model's plain checkpoint out of its quantised file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

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


def make_mla(folder: Path) -> None:
    """Latents of 512 elements with rotary keys of 64, as the kernels for such models have them; no experts."""
    torch.manual_seed(1)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    DeepseekV2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **SPECIAL).save_pretrained(folder)


def make_vision(folder: Path) -> None:
    """A BLIP-2 whose 32 queries look at images of 64 x 64, in front of a small Llama; processed without torchvision."""
    torch.manual_seed(3)
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
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
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = Blip2VisionConfig(**sizes, image_size=64, patch_size=8, initializer_range=0.5)
    queries = Blip2QFormerConfig(**sizes, vocab_size=64, encoder_hidden_size=64, max_position_embeddings=64)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), **SPECIAL, extra_special_tokens={"image_token": "<image>"}
    )
    parts = {"vision_config": vision, "qformer_config": queries, "text_config": text}
    config = Blip2Config(
        **{name: part.to_dict() for name, part in parts.items()},
        num_query_tokens=32,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = Blip2ForConditionalGeneration(config).to(torch.float32)
    for name, tensor in model.named_parameters():
        if "query_tokens" in name or "language_projection" in name:
            torch.nn.init.normal_(tensor, std=0.5)  # wide enough that an image decides about the answer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizing = {"do_resize": True, "size": {"height": 64, "width": 64}, "resample": 3, "do_convert_rgb": True}
    scaling = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    means = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    images = {"image_processor_type": "BlipImageProcessor"} | sizing | scaling | means
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 32}
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def make_lora(seed: int, folder: Path) -> None:
    """An adapter of rank 4 for keys and values of all layers, strong enough to change every answer."""
    torch.manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name in ("k_proj", "v_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(4, 256) * 0.25
            weights[f"{place}.lora_B.weight"] = torch.randn(128, 4) * 0.25
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    config |= {"target_modules": ["k_proj", "v_proj"], "base_model_name_or_path": "tiny", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


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
    elif kind == "mla":
        make_mla(folder)
    elif kind == "vision":
        make_vision(folder)
    elif kind == "lora":
        make_lora(int(rest[0]), folder)
    else:
        convert(Path(rest[0]), folder)
    print(json.dumps(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    main()
