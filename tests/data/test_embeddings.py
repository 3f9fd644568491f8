"""Embeddings of tiny encoders with random weights: correct, computed once, and intact after interruptions."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from encoders import make_encoder
from filelock import FileLock
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from torchcaps.data import DataError, Encoder, embeddings
from torchcaps.data.encoder import _no_model

TEXTS = ["a good film .", "bad", "is not very , very bad", "a good film ."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    transformers.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("encoders")
    return {kind: make_encoder(root / kind, kind) for kind in ("bert", "gpt2", "t5")}


@pytest.fixture(params=["bert", "gpt2", "t5"])
def folder(request, folders) -> Path:
    return folders[request.param]


def encoder(folder: Path, tmp_path: Path) -> Encoder:
    return Encoder(str(folder), cache=tmp_path / "kept")


def by_hand(folder: Path, text: str) -> torch.Tensor:
    """Hidden states of one text alone, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text).input_ids
    if folder.name != "bert":
        ids = [*ids, tokenizer.eos_token_id]
    if folder.name == "t5":
        model = model.encoder
    with torch.no_grad():
        return torch.stack(model(torch.tensor([ids]), output_hidden_states=True).hidden_states, 2)[0]


def counted(monkeypatch) -> list[list[str]]:
    """Record the texts of each call of a model."""
    computed: list[list[str]] = []
    own = Encoder._compute

    def compute(self, texts, store):
        computed.append(texts)
        own(self, texts, store)

    monkeypatch.setattr(Encoder, "_compute", compute)
    return computed


def test_all_hidden_states_of_each_text_whatever_batch_it_is_in(folder, tmp_path):
    embedded, mask = encoder(folder, tmp_path).embed(TEXTS).padded([0, 1, 2, 3])
    assert embedded.dtype == torch.float16
    assert mask.dtype == torch.float32
    for text, states, present in zip(TEXTS, embedded, mask, strict=True):
        expected = by_hand(folder, text)
        count = len(expected)
        assert present.tolist() == [1] * count + [0] * (len(present) - count)
        torch.testing.assert_close(states[:count].float(), expected, rtol=1e-3, atol=1e-3)
        assert not states[count:].any()
    assert embedded.shape == (4, max(len(by_hand(folder, text)) for text in TEXTS), 3, 8)


def test_a_text_is_computed_once_and_kept_once(folders, tmp_path, monkeypatch):
    computed = counted(monkeypatch)
    first = encoder(folders["bert"], tmp_path).embed(TEXTS)
    assert computed == [sorted(set(TEXTS))]
    assert first.padded([0])[0].equal(first.padded([3])[0])
    monkeypatch.setattr(Encoder, "_load", lambda self: pytest.fail("no text is new"))
    again = encoder(folders["bert"], tmp_path).embed(TEXTS[1:])
    np.testing.assert_array_equal(again.tokens, first.tokens[1:])
    assert again.padded([0, 1, 2])[0].equal(first.padded([1, 2, 3])[0])
    assert len(files_of(tmp_path)) == 1


def test_new_texts_are_added(folders, tmp_path, monkeypatch):
    computed = counted(monkeypatch)
    one = encoder(folders["gpt2"], tmp_path).embed(TEXTS[:1])
    both = encoder(folders["gpt2"], tmp_path).embed(TEXTS[:2])
    assert computed == [[TEXTS[0]], [TEXTS[1]]]
    assert both.padded([0])[0].equal(one.padded([0])[0])
    alone = encoder(folders["gpt2"], tmp_path / "other").embed(TEXTS[:2])
    torch.testing.assert_close(both.padded([0, 1])[0], alone.padded([0, 1])[0], rtol=1e-3, atol=1e-3)


def test_models_do_not_share(folders, tmp_path):
    other = make_encoder(tmp_path / "bert", seed=1)  # with the same name
    folder = encoder(folders["bert"], tmp_path).folder
    assert folder.name.startswith("bert-")
    assert encoder(other, tmp_path).folder != folder
    moved = shutil.copytree(folders["bert"], tmp_path / "elsewhere" / "bert")
    assert encoder(moved, tmp_path).folder == folder


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").rglob("*.safetensors"))


def small_batches(monkeypatch) -> None:
    monkeypatch.setattr("torchcaps.data.encoder.TOKENS_AT_ONCE", 1)  # a batch for each text


def test_what_an_interrupted_run_computed_is_kept(folders, tmp_path, monkeypatch):
    small_batches(monkeypatch)
    whole = encoder(folders["bert"], tmp_path / "whole").embed(TEXTS)
    own = embeddings.EmbeddingStore.add
    added = []

    def add(self, texts, tokens, states, cut):
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(texts)
        own(self, texts, tokens, states, cut)

    with monkeypatch.context() as patch:
        patch.setattr(embeddings.EmbeddingStore, "add", add)
        with pytest.raises(KeyboardInterrupt):
            encoder(folders["bert"], tmp_path).embed(TEXTS)
    computed = counted(monkeypatch)
    resumed = encoder(folders["bert"], tmp_path).embed(TEXTS)
    assert computed == [sorted(set(TEXTS) - {text for texts in added for text in texts})]
    for i in range(4):
        torch.testing.assert_close(resumed.padded([i])[0], whole.padded([i])[0])


def test_a_run_that_is_killed_while_it_writes(folders, tmp_path, monkeypatch):
    """What is not whole has another name, does not count, and is removed by the next run that computes."""
    small_batches(monkeypatch)
    whole = encoder(folders["bert"], tmp_path).embed(TEXTS)
    expected = [whole.padded([i])[0].clone() for i in range(4)]
    *_, last = files_of(tmp_path)
    unfinished = last.with_name(f".{last.stem}.123.unfinished.safetensors")
    unfinished.write_bytes(last.read_bytes()[:-7])
    last.unlink()
    computed = counted(monkeypatch)
    again = encoder(folders["bert"], tmp_path).embed(TEXTS)
    assert [len(texts) for texts in computed] == [1]
    for i in range(4):
        torch.testing.assert_close(again.padded([i])[0], expected[i])
    assert not unfinished.exists()


def test_damage_is_an_error(folders, tmp_path):
    kept = encoder(folders["bert"], tmp_path)
    kept.embed(TEXTS)
    (path,) = files_of(tmp_path)
    good = path.read_bytes()
    for content in (b"", good[:100], good[:-7], good + b"more", bytes(len(good)), good.replace(b"keys", b"mops")):
        path.write_bytes(content)
        for texts in (TEXTS, ["new"]):
            with pytest.raises(DataError, match=f"^{path}: cannot be read .*: remove it to have its embeddings comp"):
                kept.embed(texts)
    path.unlink()
    assert kept.embed(TEXTS).tokens.tolist() == [6, 3, 8, 6]


OTHER_FILES = {
    "int8": lambda kept: kept.update(states=kept["states"].to(torch.int8)),
    "float32": lambda kept: kept.update(states=kept["states"].float()),
    "a count of 2 ** 62": lambda kept: kept["tokens"].copy_(2**62 + torch.tensor([0, 0, 0, 4])),  # the sum is 4
    "a negative count": lambda kept: kept["tokens"].add_(torch.tensor([-9, 9, 0, 0])),
    "counts of another type": lambda kept: kept.update(tokens=kept["tokens"].double()),
    "counts in two columns": lambda kept: kept.update(tokens=kept["tokens"].view(2, 2)),
    "keys of another type": lambda kept: kept.update(keys=kept["keys"].view(torch.int64)),
    "short keys": lambda kept: kept.update(keys=kept["keys"][:, :8].contiguous()),
    "no width": lambda kept: kept.update(states=kept["states"][:, :, :0].contiguous()),
    "no layers": lambda kept: kept.update(states=kept["states"][:, 0].contiguous()),
    "another width": lambda kept: kept.update(states=kept["states"][:, :, :2].contiguous()),
}


@pytest.mark.parametrize("what", OTHER_FILES)
def test_files_of_something_else(what, tmp_path):
    store = embeddings.EmbeddingStore(tmp_path)
    states = torch.ones(4, 2, 4, dtype=torch.float16)
    store.add(["a", "b", "c", "d"], [1, 1, 1, 1], states)
    (path,) = tmp_path.glob("*.safetensors")
    kept = load_file(path)
    OTHER_FILES[what](kept)
    save_file(kept, tmp_path / "other.safetensors")
    for reader in (store, embeddings.EmbeddingStore(tmp_path)):  # one that has read the first file, and a new one
        with pytest.raises(DataError, match=r"^.*other.safetensors: cannot be read .*: remove it to have its embeddi"):
            reader.read()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite(value, tmp_path):
    store = embeddings.EmbeddingStore(tmp_path)
    states = torch.ones(3, 2, 4, dtype=torch.float16)
    states[2, 1, 3] = value
    store.add(["a", "b"], [1, 2], states)
    both = pickle.loads(pickle.dumps(store.of(["a", "b"])))
    assert both.padded([0])[0].equal(torch.ones(1, 1, 2, 4, dtype=torch.float16))
    for _ in range(2):
        with pytest.raises(DataError, match="has embeddings that are NaN or infinite: remove it to have its"):
            both.padded([0, 1])


def test_two_processes_at_once(folders, tmp_path):
    """Kept embeddings are read without a lock while another run computes; a text that two have added counts once."""
    kept = encoder(folders["bert"], tmp_path)
    expected = kept.embed(TEXTS).padded([0, 1])[0]
    before = {path: path.stat().st_mtime_ns for path in kept.folder.iterdir()}
    with FileLock(kept.folder / "run.lock"):
        found = kept.embed(TEXTS)
    torch.testing.assert_close(found.padded([0, 1])[0], expected)
    assert before == {path: path.stat().st_mtime_ns for path in kept.folder.iterdir()}
    store = embeddings.EmbeddingStore(kept.folder)
    for texts in (["bad", "x"], ["y", "bad"]):
        store.add(texts, [1, 2], torch.ones(3, 3, 8).half())
    assert len(files_of(tmp_path)) == 3
    assert kept.embed(["y", "x"]).tokens.tolist() == [1, 2]


def test_what_is_pickled_is_the_way_to_the_states(folders, tmp_path):
    embedded = encoder(folders["bert"], tmp_path).embed([" ".join(["bad"] * n) for n in range(1, 11)])
    states = embedded.padded([3])[0]
    raw = pickle.dumps(embedded)
    assert len(raw) < embedded.padded(range(10))[0].nbytes / 5
    torch.testing.assert_close(pickle.loads(raw).padded([3])[0], states)


def test_texts_that_are_too_long(folders, tmp_path):
    with pytest.raises(DataError, match=r"bert takes texts of 1 to 12 tokens, and 'bad bad .* has 13: choose"):
        encoder(folders["bert"], tmp_path).embed(["good", "bad " * 11])
    assert encoder(folders["bert"], tmp_path).embed(["bad " * 10]).tokens.tolist() == [12]
    with pytest.raises(DataError, match=r"gpt2 takes texts of 1 to 12 tokens"):
        encoder(folders["gpt2"], tmp_path).embed(["bad " * 12])
    with pytest.raises(DataError, match="no text to embed"):
        encoder(folders["gpt2"], tmp_path).embed([])


def test_a_text_without_tokens(folders, tmp_path):
    config = shutil.copytree(folders["gpt2"], tmp_path / "no end") / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in values.items() if "eos" not in key}))
    with pytest.raises(DataError, match=r"and ''... has 0: choose another encoder, or leave out the text$"):
        encoder(config.parent, tmp_path).embed([""])


def test_states_beyond_half_precision(folders, tmp_path):
    model = transformers.AutoModel.from_pretrained(folders["bert"])
    model.encoder.layer[1].output.LayerNorm.bias.data.fill_(1e6)
    huge = shutil.copytree(folders["bert"], tmp_path / "huge")
    model.save_pretrained(huge)
    with pytest.raises(DataError, match="huge has hidden states that are NaN or too large for half precision"):
        encoder(huge, tmp_path).embed(["bad"])


def test_no_room(folders, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10**9, 10**9, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DataError, match=r"the embeddings need 0.0 GB, and 0.0 GB are free: free disk space, or choose another"
    ):
        encoder(folders["bert"], tmp_path).embed(TEXTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError,
        match="file is a file, and must be a folder: free disk space, make the folder writable, or choose another",
    ):
        Encoder(str(folders["bert"]), cache=tmp_path / "file").embed(TEXTS)


def test_folders_without_a_model(folders, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match="empty is not a folder from which transformers can load a model and its tokenizer"
    ):
        encoder(tmp_path / "empty", tmp_path).embed(["bad"])
    monkeypatch.setenv("HOME", str(tmp_path))
    broken = shutil.copytree(folders["bert"], tmp_path / "broken")
    assert encoder(Path("~/broken"), tmp_path).embed(["good"]).tokens.tolist() == [3]
    os.truncate(broken / "model.safetensors", 100)
    with pytest.raises(
        DataError, match=r"broken is not a folder from which transformers can load .*\(SafetensorError: "
    ):
        encoder(broken, tmp_path).embed(["bad"])
    asking = shutil.copytree(folders["bert"], tmp_path / "asking")
    config = json.loads((asking / "config.json").read_text())
    (asking / "config.json").write_text(json.dumps({**config, "attn_implementation": "somebody/kernel"}))
    with pytest.raises(DataError, match="names a kernel of the Hub as attn_implementation, which is code"):
        encoder(asking, tmp_path).embed(["bad"])
    with pytest.raises(ValueError, match="revision is for models on the Hub, and .* is a folder: leave it out"):
        Encoder(str(tmp_path / "empty"), revision="main")


def test_a_model_of_the_hub_that_cannot_be_loaded():
    """Only what was not found may be found online."""
    said = str(_no_model("someone/tiny", ValueError("its tokenizer needs a package")))
    assert said.endswith("(ValueError: its tokenizer needs a package): mend this, or choose another encoder")
    assert "go online once, check its name, or" in str(_no_model("someone/tiny", ConnectionError("no answer")))


def test_models_of_the_hub_without_a_network(folders, tmp_path, monkeypatch):
    """In Hugging Face's cache a commit identifies a model. A missing model is an error of one line."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "home" / "hub" / "models--someone--tiny"
    shutil.copytree(folders["bert"], model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (None, commit):
        hub_encoder = Encoder("someone/tiny", revision, tmp_path / "kept")
        assert hub_encoder.revision == f"someone/tiny@{commit}"
        assert hub_encoder.embed(["bad"]).padded([0])[0].shape == (1, 3, 3, 8)
        shutil.rmtree(model, ignore_errors=True)  # with a complete commit hash, the kept embeddings are enough
    with pytest.raises(DataError, match="^the encoder 'someone/tiny' is not a folder .* not in Hugging Face's cache"):
        Encoder("someone/tiny", None, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.name.startswith("someone-tiny-")
