"""Own arrays in folders and tables: shape, standardization, bad files, augmentation, memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from signals import write_signals, write_volumes

from torchcaps.data import ArrayFolder, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_signals(tmp_path / "signals", 10, (3, 40))


def data_of(folder: Path, **options) -> ArrayFolder:
    return ArrayFolder(str(folder), **{"layout": "CL", "num_workers": 0, **options})


def error_of(folder: Path, **options) -> str:
    def use() -> None:
        data = data_of(folder, **options)
        data.prepare_data()
        data.resolved_arguments()
        data.setup()

    with pytest.raises((DataError, ValueError)) as caught:
        use()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classes_and_shape_are_those_of_the_arrays(folder, tmp_path):
    data = data_of(folder)
    assert data.network_arguments() == {"classes": 2, "in_channels": 3, "dims": 1}
    assert (data.names, data.shape, data.title) == (["fast", "slow"], (3, 40), "arrays in signals")
    data = data_of(write_volumes(tmp_path / "volumes", 4), layout="DHW", size=[8, 12, 16])
    assert data.network_arguments() == {"classes": 2, "in_channels": 1, "dims": 3}
    data.setup()
    assert next(iter(data.train_dataloader()))[0].shape == (4, 1, 8, 12, 16)


def test_training_arrays_are_standardized(folder):
    for path in folder.rglob("*.npy"):
        np.save(path, np.load(path) * [[1], [20], [300]] + [[5], [0], [-7000]])
    data = data_of(folder)
    data.setup()
    arrays = torch.stack([array for array, _ in data.train_set])
    torch.testing.assert_close(arrays.mean((0, 2)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(arrays.std((0, 2), correction=0), torch.ones(3))
    again = ArrayFolder(layout="CL", **data.resolved_arguments())  # without the files
    path = next(folder.rglob("*.npy"))
    assert torch.equal(again.picture(path), data.picture(path))
    assert again.network_arguments() == data.network_arguments()


def test_the_layout_is_said_and_never_guessed(folder, tmp_path):
    message = error_of(folder, layout=None)
    assert "fast/00.npy have the shape 3x40: give --data.layout CL or LC or HW (C: channels" in message
    volumes = write_volumes(tmp_path / "volumes", 3)
    assert "10x12x14: give --data.layout CHW or HWC or DHW" in error_of(volumes, layout=None)
    assert "10x12x14, and data.layout CL has 2 letters" in error_of(volumes)
    square = write_signals(tmp_path / "square", 4, (16, 16))
    path = square / "slow" / "00.npy"
    rows, columns = (data_of(square, layout=layout).form.values(path) for layout in ("CL", "LC"))
    assert np.array_equal(rows, columns.T)


def test_channels_that_may_be_moments_are_said(folder, capfd):
    data_of(folder, layout="LC").prepare_data()
    assert "an array has 40 channels of the size 3: if C stands in the wrong place" in capfd.readouterr().err


def test_arrays_of_several_sizes(folder, capfd):
    paths = sorted((folder / "slow").iterdir())
    for path, length in zip(paths, (30, 30, 30, 50, 50, 50, 50, 50, 50, 50), strict=True):
        np.save(path, np.ones((3, length), np.float32) * np.arange(length))
    message = error_of(folder)
    assert "have several sizes, such as" in message
    assert "--data.size '[40]'" in message
    data = data_of(folder, size=[40])
    data.prepare_data()
    assert "longer than data.size 40 and cut" in capfd.readouterr().err
    data.setup()
    long, short = data.picture(paths[-1]), data.picture(paths[0])
    values = long * torch.tensor(data.form.deviations)[:, None] + torch.tensor(data.form.means)[:, None]
    torch.testing.assert_close(values[0], torch.arange(5.0, 45.0), rtol=1e-4, atol=1e-3)
    assert short[:, :5].eq(0).all()
    assert short[:, 35:].eq(0).all()
    assert "has the size 50, and was cut or padded to 40" in capfd.readouterr().err


def test_the_advised_size_is_that_of_most_arrays(folder):
    for path in sorted((folder / "slow").iterdir())[:4]:
        np.save(path, np.ones((3, 10)))
    assert "--data.size '[40]'" in error_of(folder)


def test_arguments_that_do_not_fit(folder):
    assert "size must have a number for each dimension of layout CL" in error_of(folder, size=[3, 40])
    assert "means and deviations must" in error_of(folder, means=[0.0] * 3)
    said = error_of(folder, means=[0.0] * 2, deviations=[1.0] * 2)
    assert "means and deviations must have 3 numbers each" in said
    split = folder.parent / "split.csv"
    split.write_text("file,part\n" + "\n".join(f"{path},test" for path in data_of(folder).parts))
    assert "has no training array: choose another split" in error_of(folder, split=str(split))
    with pytest.raises(DataError, match="data.folder is missing: give --data.folder FOLDER, expected a folder"):
        ArrayFolder(layout="CL").network_arguments()


def test_bad_files_are_one_line_or_left_out(folder, capfd):
    np.save(folder / "slow" / "bad.npy", np.full((3, 40), np.nan))
    np.save(folder / "fast" / "wide.npy", np.zeros((4, 40)))
    (folder / "slow" / "text.npy").write_text("1 2 3")
    message = error_of(folder)
    assert "is not an array that can be read" in message
    assert "(and 2 more: " in message
    assert "--data.skip_bad true" in message
    data = data_of(folder, skip_bad=True)
    data.setup()
    assert "left out 3 arrays that cannot be read: " in capfd.readouterr().err
    assert sum(len(x) for x in (data.train_set, data.val_set, data.test_set)) == 20


def test_nothing_can_be_read(folder):
    for path in folder.rglob("*.npy"):
        path.write_bytes(b"")
    assert "numpy.savez (and 11 more: fast/" in error_of(folder, skip_bad=True)


def test_arrays_of_one_value_and_copies_are_said(folder, capfd):
    data = data_of(folder)
    tested = [path for path, part in data.parts.items() if part == "test"]
    trained = [path for path, part in data.parts.items() if part == "train"]
    np.save(folder / trained[1], np.zeros((3, 40), np.float32))
    for path in trained:
        array = np.load(folder / path)
        array[2] = 0.1
        np.save(folder / path, array)
    (folder / tested[0]).write_bytes((folder / trained[0]).read_bytes())
    data.setup()
    said = capfd.readouterr().err
    assert "a channel has one value alone: channel 2 from 0" in said
    assert data.form.deviations[2] == 1
    assert "1 array with one value alone" not in said  # its third channel is another
    assert f"training has 1 of {len(tested)} test arrays too" in said
    np.save(folder / trained[1], np.zeros((3, 40)))
    data_of(folder).setup()
    assert f"1 array with one value alone: {trained[1]}" in capfd.readouterr().err


def test_a_table_names_arrays(folder, tmp_path):
    rows = [f"{path.stem}-{path.parent.name},{path.parent.name[0]}" for path in sorted(folder.rglob("*.npy"))]
    (tmp_path / "flat").mkdir()
    for path in folder.rglob("*.npy"):
        path.rename(tmp_path / "flat" / f"{path.stem}-{path.parent.name}.npy")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["record,kind", *rows]))
    data = data_of(tmp_path / "flat", table=str(table), array="record", label="kind")
    assert data.names == ["f", "s"]
    data.setup()
    assert data.samples("test", [0, 1])[0].shape == (2, 3, 40)


def test_batches_and_workers(folder):
    data = data_of(folder, batch_size=5)
    workers = data_of(folder, batch_size=5, num_workers=1)
    for each in (data, workers):
        each.setup("test")
    for (arrays, labels), (same, same_labels) in zip(data.test_dataloader(), workers.test_dataloader(), strict=True):
        assert torch.equal(arrays, same)
        assert torch.equal(labels, same_labels)
    kept = data.test_set.on(torch.device("cpu"))
    assert kept.device == torch.device("cpu")
    assert torch.equal(kept[1][0], data.test_set[1][0])
    assert kept[1][0].dtype == torch.float32


def test_reading_does_not_keep_the_arrays(tmp_path):
    folder = write_signals(tmp_path / "signals", 20, (4, 50_000))  # 800 kB each
    data = data_of(folder, batch_size=2)
    data.prepare_data()
    data.resolved_arguments()
    tracemalloc.start()
    data.setup()
    for _ in data.train_dataloader():
        pass
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 4_000_000  # five of forty


def test_augmentation(folder):
    arrays = torch.zeros(200, 2, 16, 24)
    arrays[:, :, 8, 12] = 1
    shifted = data_of(folder, augmentations=["shift"]).augment(arrays)
    assert (shifted.flatten(1).sum(1) == 2).all()  # both channels move together
    assert torch.equal(shifted[:, 0], shifted[:, 1])
    places = shifted[:, 0].nonzero()
    assert set(places[:, 1].tolist()) == {6, 7, 8, 9, 10}
    assert set(places[:, 2].tolist()) == {9, 10, 11, 12, 13, 14, 15}
    edge = data_of(folder, augmentations=["shift"]).augment(torch.ones(50, 1, 16))
    assert {round(x) for x in edge.sum((1, 2)).tolist()} == {14, 15, 16}  # gaps are zeros
    same = torch.randn(3, 2, 16)
    assert torch.equal(data_of(folder).augment(same), same)


def test_shifts_are_said_for_numbers(folder, tmp_path, capfd):
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.npy"))
    table = tmp_path / "numbers.csv"
    table.write_text("file,x\n" + "".join(f"{name},{place}\n" for place, name in enumerate(files)))
    data_of(folder, table=str(table), numbers=["x"], augmentations=["shift"]).prepare_data()
    assert "data.augmentations has shift, which may change" in capfd.readouterr().err


def test_what_is_wrong_with_the_layout_is_said_once(folder):
    said = error_of(folder, layout=None)
    assert said.endswith("give --data.layout CL or LC or HW (C: channels; L: moments; D, H, W: depth, height, width)")
    assert "data.layout CHW has 3 letters): set data.layout to CL or LC or HW, or leave" in error_of(
        folder, layout="CHW"
    )
