"""The tokenizer (byte-level BPE, Qwen's pre-tokenisation) and the token arrays made with it.

    python data/recipe/tokenizer.py --work WORK   # WORK/tokenizer.json, WORK/tokens.npz, bytes per token on stdout

This module does not know about the network or training. `<|endoftext|>` is id 0 and ends every document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import corpus
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 2048
EOS = "<|endoftext|>"
# The split pattern of Qwen2/3 tokenizers (tokenizer.json, pre_tokenizer), one digit at a time.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB entries, the 256 bytes included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(max_length: int) -> dict:
    """tokenizer_config.json: what transformers needs to open tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


def encode(tokenizer: Tokenizer, docs: list[corpus.Document]) -> dict[str, np.ndarray]:
    """uint16 arrays `train_<corpus>` and `held_<corpus>`: the documents in order, each ended by EOS."""
    eos = tokenizer.token_to_id(EOS)
    out = {}
    for name in corpus.CORPORA:
        for part, held in (("train", False), ("held", True)):
            texts = [d.text for d in docs if d.corpus == name and d.held_out == held]
            ids = [i for e in tokenizer.encode_batch(texts) for i in [*e.ids, eos]]
            out[f"{part}_{name}"] = np.array(ids, dtype=np.uint16)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="another tokenizer.json, for its bytes per token")
    args = parser.parse_args()
    docs = corpus.load(args.work)
    tokenizer = train_tokenizer([d.text for d in docs if not d.held_out])
    tokenizer.save(str(args.work / "tokenizer.json"))
    arrays = encode(tokenizer, docs)
    np.savez(args.work / "tokens.npz", **arrays)
    sizes = {"tokens": {k: len(v) for k, v in arrays.items()}}
    others = {"this": tokenizer, **({"other": Tokenizer.from_file(str(args.compare))} if args.compare else {})}
    for label, tok in others.items():
        for name in corpus.CORPORA:
            texts = [d.text for d in docs if d.corpus == name and d.held_out]
            size, count = sum(len(t.encode()) for t in texts), sum(len(e.ids) for e in tok.encode_batch(texts))
            sizes[f"bytes per held-out token, {label}, {name}"] = round(size / count, 3)
    print(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    main()
