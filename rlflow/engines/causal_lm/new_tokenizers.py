"""Tokenizers of models with random weights: one token for each byte, or for each of a few characters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlflow.recipe import Model
from rlflow.recipe.recipe import NUM_BYTE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


END_TOKEN = "<|end|>"
_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# These are no special tokens, as in Qwen3: they stay when a response is decoded.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# ChatML, with calls of tools and their results in the form of Qwen3. Tools themselves are shown in short, because each
# byte is a token. Thoughts stay where a model wrote them.
_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools or system %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{%- for tool in tools %}
{%- set function = tool.function or tool %}
{{- '\\n' if system or not loop.first }}
{{- function.name + '(' + ((function.parameters or {}).properties or {}) | join(', ') + ')' }}
{{- ': ' + function.description if function.description }}
{%- endfor %}
{{- '\\nCall: <tool_call>{\"name\": NAME, \"arguments\": {...}}</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>{\"name\": \"' + function.name + '\", \"arguments\": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def new_tokenizer(options: Model) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model with random weights."""
    if options.characters is None:
        return _byte_tokenizer()
    tower = options.architecture and options.architecture.vision
    return _character_tokenizer(options.characters, tower.tokens if tower else {})


def _byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Build a tokenizer whose token number n is the byte n, followed by those of ChatML, thoughts and tools.

    It has a chat template, and encodes every text.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    # The library stands for each byte by a character: itself where it can be printed, else one from U+0100 on.
    alphabet = set(ByteLevel.alphabet())
    shifted = iter(sorted(character for character in alphabet if ord(character) > 255))
    characters = [chr(byte) if chr(byte) in alphabet else next(shifted) for byte in range(256)]
    words = Tokenizer(BPE({character: byte for byte, character in enumerate(characters)}, []))
    words.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = ByteDecoder()
    words.add_special_tokens([_PAD, _START, _END])
    words.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    assert words.get_vocab_size() == NUM_BYTE_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token=_END,
        pad_token=_PAD,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _character_tokenizer(characters: str, special: Mapping[str, str]) -> "PreTrainedTokenizerBase":
    """Build a tokenizer with one token per character and an end token, which also pads. It refuses other characters.

    ``special`` are tokens of images by their names.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokens = [END_TOKEN, *dict.fromkeys(characters), *special.values()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = Fuse()
    words.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END_TOKEN, pad_token=END_TOKEN, extra_special_tokens=dict(special)
    )
