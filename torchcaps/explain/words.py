"""Which tokens each word of a text has, and shares of tokens summed over words."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data import DataError, Encoder, TextData
from torchcaps.utils.arguments import Count, FloatTensor, checked

WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")  # letters and digits, also with an apostrophe, or a mark


class Word(NamedTuple):
    """A word or a mark of a text.

    Fields:
        text: the word.
        start: place of its first character in the text.
        tokens: indices of its tokens; none if the encoder has cut the text before it.
    """

    text: str
    start: int
    tokens: list[int]


class LoadedEncoder(Encoder):
    """An :class:`torchcaps.data.Encoder` whose model stays in memory, for texts that come one by one."""

    _loaded: tuple[Any, Any] | None = None

    @classmethod
    @checked
    def of(cls, data: TextData) -> "LoadedEncoder":
        """Return the encoder of some data."""
        return cls(data.encoder, data.revision, data.cache, data.truncate)

    @torch.no_grad()
    @checked
    def states(self, text: str) -> tuple[Tensor, Tensor]:
        """Return the embeddings of a text and its mask, as the batch of one text from `Embeddings.padded`.

        Nothing of it is kept on the disk.

        Raises:
            DataError: see :class:`torchcaps.data.Encoder`.
        """
        model, tokenizer = self._load()
        (ids,), _ = self._tokenized([text], model, tokenizer)
        states = model(input_ids=torch.tensor([ids], device=model.device), output_hidden_states=True).hidden_states
        return torch.stack(states, 2).half().cpu(), torch.ones(1, len(ids))

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            self._loaded = super()._load()
        return self._loaded


@checked
def words_of(encoder: Encoder, text: str) -> list[Word]:
    """Return the words and marks of a text, in order, with the tokens that an encoder makes of each.

    A token belongs to the word with which it has most characters in common. Tokens that the tokenizer adds, such as
    those at the beginning and the end of a text, belong to no word.

    Args:
        encoder: the encoder. Its model is loaded; a :class:`LoadedEncoder` does this once.
        text: the text.

    Raises:
        DataError: the model cannot be loaded, the text is too long for it, or its tokenizer does not say which
            characters a token has.
    """
    model, tokenizer = encoder._load()
    (ids,), (cut,) = encoder._tokenized([text], model, tokenizer)
    if not tokenizer.is_fast:
        raise DataError(
            f"{encoder.name} has a tokenizer in Python, which does not say which characters a token has: train "
            "with an encoder that has a tokenizer.json"
        )
    limit = {"truncation": True, "max_length": len(ids)} if cut else {}
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False, **limit)
    words = [Word(match.group(), match.start(), []) for match in WORD.finditer(text)]
    for index, (known, token, span) in enumerate(zip(ids, encoded.input_ids, encoded.offset_mapping, strict=False)):
        common = [_in_common(word, span) for word in words]
        if known == token and any(common):  # they differ only where a cut text got an end
            words[common.index(max(common))].tokens.append(index)
    return words


def _in_common(word: Word, span: tuple[int, int]) -> int:
    """Return how many characters a word and a span of the text have in common."""
    return max(0, min(word.start + len(word.text), span[1]) - max(word.start, span[0]))


@checked
def word_shares(words: Sequence[Word], shares: FloatTensor, layers: Count) -> Tensor:
    r"""Sum the shares of tokens in the classes over words.

    The children of an :class:`torchcaps.models.EmbeddingCapsNet` are the tokens in each layer l of the encoder. With
    the share :math:`C_{k,tl}` of token t in class k, the share of a word w is

    .. math:: W_{kw} = \sum_{t \in w} \sum_l C_{k,tl}

    What a row lacks to one belongs to tokens of no word, such as those at the beginning and the end of a text.

    Args:
        words: words of the text, from :func:`words_of`.
        shares: shares of the children, all layers of the first token first, `(batch, classes, tokens * layers)`; see
            :func:`torchcaps.explain.credit`.
        layers: number of embeddings per token.

    Returns:
        `(batch, classes, words)`.

    Raises:
        ValueError: there is no word, the shares have another shape, or a word has a token that they lack.
    """
    if not words:
        raise ValueError("the text has no word: give one with letters, digits or marks")
    if shares.dim() != 3 or shares.shape[2] % layers:
        raise ValueError(
            f"expected shares of shape (batch, classes, tokens * {layers}), with {layers} layers, got "
            f"{tuple(shares.shape)}"
        )
    tokens = shares.unflatten(2, (-1, layers)).sum(-1)
    last = max((token for word in words for token in word.tokens), default=-1)
    if last >= tokens.shape[2]:
        raise ValueError(f"the words have {last + 1} tokens or more, and there are shares of {tokens.shape[2]}")
    return torch.stack([tokens[..., word.tokens].sum(-1) for word in words], -1)
