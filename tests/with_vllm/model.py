# SPDX-License-Identifier: Apache-2.0
"""A model that fits anywhere: a tiny Llama, and a tokenizer of one token a byte, so that counts are known. It has no
weights: vLLM draws such small ones that an answer depends on the last token alone. Where answers are compared, a script
writes weights by which they depend on the whole prompt.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "tiny"
_SPECIAL: Final = ("<|bos|>", "<|eot|>", "<|pad|>")
_TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
# Run by the engine's Python, which has what it takes to write tensors.
_WRITE_ADAPTER: Final = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
directory = Path(sys.argv[1])
chance = torch.Generator().manual_seed(7)
tensors = {}
for layer in range(4):
    for name, size in (("q_proj", 256), ("v_proj", 128)):
        key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[key + ".lora_A.weight"] = torch.randn(8, 256, generator=chance) * 0.02
        tensors[key + ".lora_B.weight"] = torch.randn(size, 8, generator=chance) * 0.02
save_file(tensors, directory / "adapter_model.safetensors")
config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
          "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny"}
(directory / "adapter_config.json").write_text(json.dumps(config))
"""
# Only printable ASCII has a score: no answer ends by itself, and each token is a character in a stream, too.
_WRITE_WEIGHTS: Final = """
import sys, torch
from safetensors.torch import save_file
chance = torch.Generator().manual_seed(7)
def drawn(*shape):
    return torch.randn(*shape, generator=chance) * shape[-1] ** -0.5
words = drawn(512, 256) * 4
words[:32], words[127:] = 0, 0
tensors = {"model.embed_tokens.weight": words, "model.norm.weight": torch.ones(256)}
sizes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
         "self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256),
         "mlp.down_proj": (256, 512)}
for layer in range(4):
    for name, shape in sizes.items():
        tensors[f"model.layers.{layer}.{name}.weight"] = drawn(*shape) * (2 if name.startswith("self_attn") else 1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(256)
save_file(tensors, sys.argv[1] + "/model.safetensors", metadata={"format": "pt"})
"""


def write_model(directory: Path) -> None:
    """``config.json``, ``tokenizer.json``, ``tokenizer_config.json``."""
    directory.mkdir()
    vocabulary = {letter: byte for byte, letter in _byte_letters().items()}
    added = [
        {
            "id": 256 + number,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, text in enumerate(_SPECIAL)
    ]
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": levels,
        "post_processor": None,
        "decoder": levels,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"), None),
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**vocabulary, **{text: 256 + number for number, text in enumerate(_SPECIAL)}},
            "merges": [],
        },
    }
    names = dict(zip(("bos_token", "eos_token", "pad_token"), _SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, **names}
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def adapter_script(directory: Path) -> list[str]:
    """Arguments of a Python with torch, which writes a LoRA adapter of random numbers into ``directory``."""
    return ["-c", _WRITE_ADAPTER, str(directory)]


def weights_script(directory: Path) -> list[str]:
    """Likewise, which writes the weights of the model in ``directory``."""
    return ["-c", _WRITE_WEIGHTS, str(directory)]


def _byte_letters() -> dict[int, str]:
    """Bytes as printable letters, as GPT-2's tokenizer writes them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + number) for number, byte in enumerate(rest)}}
