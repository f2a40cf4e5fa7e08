"""The demo tokenizer: byte-level BPE with Qwen's pre-tokenizer, and a ChatML template. It knows no corpus."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.core.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")

# Qwen's pre-tokenizer: contractions, words with one leading mark, single digits, punctuation, line ends, blanks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that never adds a token of its own accord.

    Args:
        texts: the training texts.
        vocab_size: number of ids, the three special tokens (ids 0, 1, 2) and the 256 bytes included.

    Returns:
        A `tokenizers.Tokenizer` without normaliser, so that decoding an encoding gives the text back.

    Raises:
        UserError: when the vocabulary has no room for bytes and special tokens, or the texts fill less than all of it.
    """
    if not 259 <= vocab_size <= 65536:
        raise UserError(f"vocab_size={vocab_size} is not between 259 (bytes and special tokens) and 65536 (uint16).")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"The training text gives only {tokenizer.get_vocab_size()} of {vocab_size} tokens; lower vocab_size."
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (chat template included) as transformers reads them."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": True}
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }  # fmt: skip
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, "utf-8")
