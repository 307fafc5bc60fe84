"""Text to tokens and back, with nothing but what the GGUF file says.

The byte-level BPE tokenizer is rebuilt from the file's vocabulary, merges and pre-tokenizer name; the
names and the splits they stand for are llama.cpp's (src/llama-vocab.cpp) and, where there is one, those
of the model's own tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from corekern_examples.errors import DemoError
from corekern_examples.gguf_model import Vocabulary
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

# Tokens that end a turn or a document wherever they are in a vocabulary. Files name only one of them as
# their end of sequence, and instruction-tuned models use both.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


@dataclass(frozen=True)
class ChatML:
    """The parts of a ChatML conversation."""

    start_id: int
    end_id: int
    system: str | None
    """The system message that the file's template supplies when the conversation brings none."""


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer with the model's conventions around it."""

    tokenizer: Tokenizer
    prefix_ids: tuple[int, ...]
    """What every sequence starts with: the BOS token, where the file asks for it."""
    stop_ids: frozenset[int]
    """Generation ends at any of these."""
    chat: ChatML | None
    """None when the file has no ChatML template: prompts then go in as they are."""


def build_tokenizer(vocabulary: Vocabulary) -> ModelTokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        vocabulary: as `gguf_model.load_model` reads it.

    Raises:
        DemoError: when the file's tokenizer model or pre-tokenizer is not one that we know.
    """
    if vocabulary.model != "gpt2":
        raise DemoError(
            f"tokenizer model {vocabulary.model!r} is not supported; the demo takes 'gpt2' (byte-level BPE)"
        )
    if vocabulary.pre_tokenizer not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise DemoError(
            f"pre-tokenizer {vocabulary.pre_tokenizer!r} is not supported; the demo knows {known}"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        model = BPE(
            vocab=ids,
            merges=[tuple(merge.split(" ", 1)) for merge in vocabulary.merges],
            # Llama 3 looks a whole word up before it merges one.
            ignore_merges=vocabulary.pre_tokenizer == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise DemoError(f"the file's merges do not fit its vocabulary ({error})") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[vocabulary.pre_tokenizer]()
    tokenizer.decoder = ByteLevelDecoder()
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    # A user's text that spells a control token is text: control tokens come from code, by id.
    tokenizer.encode_special_tokens = True

    prefix_ids = ()
    if vocabulary.add_bos and vocabulary.bos_id is not None:
        prefix_ids = (vocabulary.bos_id,)
    ends = {ids[token] for token in END_TOKENS if token in ids}
    return ModelTokenizer(
        tokenizer=tokenizer,
        prefix_ids=prefix_ids,
        stop_ids=vocabulary.eos_ids | ends,
        chat=_chatml(vocabulary.chat_template, ids),
    )


def encode(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """The tokens of plain text, after the model's prefix; control tokens in it stay text."""
    return [*tokenizer.prefix_ids, *_plain(tokenizer, text)]


def encode_prompt(tokenizer: ModelTokenizer, prompt: str) -> list[int]:
    """The tokens that ask the model for an answer to `prompt`.

    With a ChatML template: the template's own system message, the user's turn, and the opening of the
    assistant's. Without: the prompt's own tokens.
    """
    chat = tokenizer.chat
    if chat is None:
        return encode(tokenizer, prompt)

    def turn(role: str, content: str) -> list[int]:
        newline = _plain(tokenizer, "\n")
        return [chat.start_id, *_plain(tokenizer, f"{role}\n{content}"), chat.end_id, *newline]

    system = [] if chat.system is None else turn("system", chat.system)
    opening = [chat.start_id, *_plain(tokenizer, "assistant\n")]
    return [*tokenizer.prefix_ids, *system, *turn("user", prompt), *opening]


def decode(tokenizer: ModelTokenizer, tokens: list[int]) -> str:
    """The text of tokens, without control tokens."""
    return tokenizer.tokenizer.decode(tokens, skip_special_tokens=True)


def text_stream(tokenizer: ModelTokenizer) -> Callable[[int], str]:
    """A function from each token of an answer to the text that it completes.

    A character can be spread over several tokens; the text comes with the last of them.
    """
    stream = DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer.tokenizer, token) or ""


def _plain(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def _chatml(template: str | None, ids: dict[str, int]) -> ChatML | None:
    if template is None or "<|im_start|>" not in template:
        return None
    if "<|im_start|>" not in ids or "<|im_end|>" not in ids:
        return None
    # Templates write the line break as itself or as the two characters of its escape.
    default = re.search(r"<\|im_start\|>system(?:\n|\\n)([^{}']+?)<\|im_end\|>", template)
    system = default.group(1).replace("\\n", "\n") if default else None
    return ChatML(ids["<|im_start|>"], ids["<|im_end|>"], system)


def _smollm() -> PreTokenizer:
    # Each digit alone, then GPT-2's words.
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _llama3() -> PreTokenizer:
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = Split(Regex(words), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
}
