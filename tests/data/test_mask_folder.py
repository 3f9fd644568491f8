"""Own pictures with masks: how they are found and read, values, sizes, tiles, and the lines for what cannot be used."""

import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import DataError, MaskFolder
from torchcaps.data.labeled import IGNORED
from torchcaps.data.mask_files import spans
from torchcaps.data.masks import MaskSet

COUNT = 12
COLORS = np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8)


def mask_of(i: int, height: int = 16, width: int = 24) -> np.ndarray:
    """A mask of three classes, whose blocks differ from file to file."""
    return np.random.default_rng(i).integers(0, 3, (height // 4, width // 4)).repeat(4, 0).repeat(4, 1).astype(np.uint8)


def write(folder: Path, pixels=lambda mask: mask, name: str = "{}.png", mask_name: str = "{}.png", **shape) -> Path:
    """Write pictures, gray levels 50 times the class, and masks, the pixels that a function makes of the classes."""
    for place in ("images", "masks"):
        (folder / place / Path(name).parent).mkdir(parents=True, exist_ok=True)
    for i in range(COUNT):
        mask = mask_of(i, **shape)
        Image.fromarray(mask * 50).save(folder / "images" / name.format(i))
        made = pixels(mask)
        made = made if isinstance(made, Image.Image) else Image.fromarray(made)
        made.save(folder / "masks" / mask_name.format(i))
    return folder


def made(folder: Path, **options) -> MaskFolder:
    return MaskFolder(str(folder), **{"num_workers": 0, "fit": "crop", **options})


def prepare(folder: Path, **options) -> None:
    data = made(folder, **options)
    data.prepare_data()
    data.setup()


def error_of(folder: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        prepare(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_masks_are_right(data: MaskFolder) -> None:
    """Check that pictures, whose gray levels are 50 times the class, and masks agree."""
    data.setup()
    for part in (data.train_set, data.val_set, data.test_set):
        images, masks = part.__getitems__(list(range(len(part))))
        counted = masks != IGNORED
        assert torch.equal((images[:, 0] / 50 + 0.4).long()[counted], masks[counted])
        assert torch.equal(part.labels, torch.stack([(masks == k).flatten(1).sum(1) for k in range(data.classes)], 1))


# Values


def with_palette(mask: np.ndarray) -> Image.Image:
    picture = Image.fromarray(mask).convert("P")
    picture.putdata(mask.flatten().tolist())
    picture.putpalette(COLORS.flatten().tolist())
    picture.info["transparency"] = 0
    return picture


WAYS = {
    "gray": (lambda mask: mask * 100, [0, 100, 200]),
    "deep": (lambda mask: mask.astype(np.uint16) * 300, [0, 300, 600]),
    "wide": (lambda mask: mask.astype(np.int32) * 70_000, [0, 70_000, 140_000]),
    "gray levels in RGB": (lambda mask: np.stack([mask * 100] * 3, 2), [0, 100, 200]),
    "with alpha": (lambda mask: np.stack([mask, 255 - mask], 2), [0, 1, 2]),
    "negative": (lambda mask: mask.astype(np.int32) - 1, [-1, 0, 1]),
    "palette": (with_palette, [0, 1, 2]),
    "colors": (lambda mask: COLORS[mask], ["000000", "0000ff", "ff0000"]),
    "colors and alpha": (lambda mask: np.dstack([COLORS[mask], mask]), ["000000", "0000ff", "ff0000"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_mask(tmp_path, way):
    pixels, values = WAYS[way]
    data = made(
        write(tmp_path, pixels, mask_name="{}.tif" if way in ("wide", "negative") else "{}.png"), channels=1, size=16
    )
    assert (data.values, data.names, data.classes) == (values, [str(value) for value in values], 3)
    data.setup()
    data.prepare_data()
    images, masks = data.test_set.__getitems__([0])
    order = torch.tensor([0, 2, 1] if "colors" in way else [0, 1, 2])  # blue comes before red
    assert torch.equal(order[masks], (images[:, 0] / 50 + 0.4).long())
    # The palette writes masks as the training has them.
    values_of_pixels = data.palette[masks[0].numpy()]
    Image.fromarray(values_of_pixels).save(tmp_path / "again.tif")
    again = np.asarray(Image.open(tmp_path / "again.tif"))
    expected = pixels(np.asarray(order[masks[0]], np.uint8))
    expected = np.asarray(expected)[..., : again.shape[2]] if "colors" in way else np.asarray(expected)
    assert np.array_equal(again, expected if expected.ndim == again.ndim else expected[..., 0])


def test_masks_of_one_bit(tmp_path):
    data = made(write(tmp_path, lambda mask: Image.fromarray(mask > 0)), size=16)
    assert data.values == [0, 255]
    assert data.palette.tolist() == [0, 255]


def test_values_their_order_and_names(tmp_path, capsys):
    folder = write(tmp_path, lambda mask: mask + 7)
    data = made(folder, values=[8, 7], ignore=9, class_names=["cell", "rest"], size=16)
    assert (data.names, data.values, data.classes) == (["cell", "rest"], [8, 7], 2)
    data.setup()
    images, masks = data.test_set.__getitems__([0, 1])
    expected = torch.tensor([1, 0, IGNORED])[(images[:, 0] / 50 + 0.4).long()]
    assert torch.equal(masks, expected)
    assert data.resolved_arguments() == {
        "class_names": ["cell", "rest"],
        "channels": 1,
        "size": 16,
        "window": None,
        "values": [8, 7],
    }
    again = MaskFolder(**data.resolved_arguments(), ignore=9)  # needs no files
    assert (again.names, again.palette.tolist(), again.network_arguments()) == (
        ["cell", "rest"],
        [8, 7],
        {"classes": 2, "in_channels": 1, "image_size": 16},
    )
    made(folder, class_names=["a", "b"], ignore=8).prepare_data()
    said = capsys.readouterr().err
    shares = [100 * np.mean([(mask_of(i) == k).mean() for i in range(COUNT)]) for k in (0, 2)]
    shares = [100 * share / sum(shares) for share in shares]
    assert (
        f"{tmp_path}: value 7 is class 'a' ({shares[0]:.2f} % of the pixels), "
        f"value 9 is class 'b' ({shares[1]:.2f} % of the pixels)\n" in said
    )


def test_the_palette_of_colors_that_are_asked_for(tmp_path):
    data = made(write(tmp_path, with_palette), values=["000000", "FF0000", "#0000ff"], channels=1, size=16)
    assert data.values == ["000000", "ff0000", "0000ff"]
    assert_masks_are_right(data)
    assert data.palette.tolist() == COLORS.tolist()
    # A command makes the number 0 of the color 000000.
    for ignore in ("000000", 0):
        data = made(tmp_path, values=["ff0000", "0000ff"], ignore=ignore, channels=1, size=16)
        data.setup()
        images, masks = data.test_set.__getitems__([0])
        assert torch.equal(masks, torch.tensor([IGNORED, 0, 1])[(images[:, 0] / 50 + 0.4).long()])


def test_a_gray_mask_among_colors(tmp_path):
    write(tmp_path, lambda mask: COLORS[mask])
    Image.fromarray(mask_of(5) // 2 * 255).save(tmp_path / "masks/5.png")
    data = made(tmp_path, size=16, values=["000000", "ff0000", "0000ff", "ffffff"])
    assert made(tmp_path).values == ["000000", "0000ff", "ff0000", "ffffff"]
    data.setup()
    parts = [(data.keys(stage), part) for stage, part in (("fit", data.train_set), ("test", data.test_set))]
    ((part, place),) = [(part, keys.index(key)) for keys, part in parts for key in keys if key == "images/5.png"]
    assert torch.equal(part[place][1], torch.from_numpy(mask_of(5)[:, 4:20]).long() // 2 * 3)


def test_classes_that_a_part_lacks(tmp_path, capsys):
    write(tmp_path, lambda mask: mask // 2)
    data = made(tmp_path, size=16, channels=1)
    data.setup()
    rare = Path(data.keys("test")[0]).name
    Image.fromarray(np.full((16, 24), 3, np.uint8)).save(tmp_path / "masks" / rare)
    made(tmp_path, size=16, channels=1).setup()
    said = capsys.readouterr().err
    assert "classes without a pixel in the training masks: 3" in said
    assert "classes without a pixel in the validation masks: 3" in said
    assert "in the test masks" not in said


@pytest.mark.parametrize("values", [None, [0, 1, 2]])
def test_palettes_that_differ(tmp_path, values):
    write(tmp_path, with_palette)
    swapped = Image.fromarray(np.array([0, 2, 1], np.uint8)[mask_of(4)]).convert("P")
    swapped.putpalette(COLORS[[0, 2, 1]].flatten().tolist())
    swapped.save(tmp_path / "masks/4.png")
    error = error_of(tmp_path, values=values, size=16)
    assert "palettes differ: 1 is the color " in error
    assert '"0000ff"' in error
    assert '"ff0000"' in error
    assert_masks_are_right(made(tmp_path, values=["000000", "ff0000", "0000ff"], channels=1))
    # Entries that no pixel has may differ.
    write(tmp_path, with_palette)
    Image.fromarray(mask_of(4)).save(tmp_path / "images/4.png")
    plain = with_palette(mask_of(4))
    plain.putpalette([*COLORS.flatten().tolist(), 9, 9, 9])
    plain.save(tmp_path / "masks/4.png")
    prepare(tmp_path, values=values, size=16)


# How files are found


@pytest.mark.parametrize("mask_name", ["{}.png", "{}_mask.png", "{}_label.tif", "{}_seg.bmp"])
def test_names_of_masks(tmp_path, mask_name):
    assert_masks_are_right(made(write(tmp_path, mask_name=mask_name), channels=1))


def test_folders_in_those_of_pictures_and_masks(tmp_path):
    for patient in "abc":
        write(tmp_path, name=patient + "/{}.png", mask_name=patient + "/{}.png")
    data = made(tmp_path, group="folder", channels=1)
    assert_masks_are_right(data)
    folders = [{Path(key).parts[1] for key in data.keys(stage)} for stage in ("fit", "validate", "test")]
    assert sorted(map(sorted, folders)) == [["a"], ["b"], ["c"]]
    data = made(tmp_path, group=r"^\d", channels=1)
    assert len(data.parts) == 3 * COUNT
    assert len({data.parts[f"images/{patient}/1.png"] for patient in "abc"}) == 1


def test_folders_of_parts(tmp_path):
    for part in ("Train", "valid", "test"):
        write(tmp_path / part)
    data = made(tmp_path, channels=1)
    assert_masks_are_right(data)
    assert {key.split("/")[0] for key in data.keys("validate")} == {"valid"}
    assert [len(x) for x in (data.train_set, data.val_set, data.test_set)] == [12, 12, 12]


def test_folders_of_parts_in_those_of_pictures_and_masks(tmp_path):
    for part in ("training", "val", "test"):
        write(tmp_path, name=part + "/{}.png", mask_name=part + "/{}.png")
    data = made(tmp_path, channels=1)
    assert_masks_are_right(data)
    folders = [{Path(key).parts[1] for key in data.keys(stage)} for stage in ("fit", "validate", "test")]
    assert folders == [{"training"}, {"val"}, {"test"}]
    for place in ("images", "masks"):
        (tmp_path / place / "training").rename(tmp_path / place / "testing")
    assert f"{tmp_path}/images: has test, testing, val, and no folder train: " in error_of(tmp_path)


def test_a_split_is_kept(tmp_path):
    data = made(write(tmp_path / "data"))
    table = data.write_split(tmp_path)
    again = made(tmp_path / "data", split=str(table))
    assert again.parts == data.parts
    assert sorted(data.parts.values()) == ["test"] * 2 + ["train"] * 8 + ["val"] * 2
    # The classes in the masks are not what the split depends on.
    write(tmp_path / "data", lambda mask: mask % 2)
    assert made(tmp_path / "data").parts == data.parts


def test_default_sizes(tmp_path):
    assert made(write(tmp_path / "a", height=20, width=44)).shape == (1, 24, 24)
    assert made(tmp_path / "a", fit="pad").shape == (1, 48, 48)
    assert made(tmp_path / "a", fit="tile").shape == (1, 24, 24)
    assert made(write(tmp_path / "b", height=140, width=160)).shape == (1, 128, 128)


# Geometry


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize(("height", "width", "size"), [(16, 24, 48), (40, 16, 48), (16, 16, 16)])
def test_a_mask_lies_where_its_picture_does_and_back(tmp_path, fit, height, width, size):
    data = made(write(tmp_path, height=height, width=width), fit=fit, size=size, channels=1)
    data.setup("test")
    for key, (image, mask) in zip(data.keys("test"), data.test_set, strict=True):
        path = tmp_path / key
        inner = mask != IGNORED
        # Colors are interpolated at the borders of blocks.
        assert ((image[0][inner].float() / 50).round() == mask[inner]).float().mean() > 0.8
        expected = np.asarray(Image.open(tmp_path / "masks" / path.name))
        placed = data.placed(mask, path)
        assert (placed.shape, placed.dtype) == ((height, width), np.uint8)
        shown = np.ones((height, width), bool)
        if fit == "crop":
            side = min(height, width)
            down, right = (height - side) // 2, (width - side) // 2
            shown[:] = False
            shown[down : down + side, right : right + side] = True
            assert (placed[~shown] == 0).all()
        assert np.array_equal(placed[shown], expected[shown])
        if height == width == size:
            every = torch.randint(3, (size, size))
            assert np.array_equal(data.placed(every, path), every.numpy())
        assert inner.all() == (fit != "pad" or height == width)


@pytest.mark.parametrize("turned", [["images"], ["images", "masks"]])
def test_photographs_are_compared_upright(tmp_path, turned):
    write(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    for i in range(COUNT):
        for place in turned:
            stored = np.rot90(mask_of(i) * (50 if place == "images" else 1))  # counterclockwise
            Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / place / f"{i}.png", exif=exif)
    data = made(tmp_path, size=16, channels=1)
    assert_masks_are_right(data)
    assert data.size_of(tmp_path / "images/0.png") == (16, 24)
    data = made(tmp_path, size=8, fit="tile", channels=1)
    assert_masks_are_right(data)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [5, 16, 17, 29, 32, 100])
def test_spans_cover_a_side_once(length, margin):
    tiles = spans(length, 16, margin)
    assert [place for tile in tiles for place in range(tile.first, tile.end)] == list(range(length))
    for tile in tiles:
        assert 0 <= tile.start <= max(0, length - 16)
        assert tile.start <= tile.first < tile.end <= tile.start + 16
        assert tile.first == 0 or tile.first - tile.start >= margin
        assert tile.end == length or tile.start + 16 - tile.end >= margin


def test_tiles(tmp_path):
    data = made(write(tmp_path, height=20, width=44), fit="tile", size=16, channels=1)
    assert_masks_are_right(data)
    assert data.keys("test")[:6] == [
        f"{data.keys('test')[0].split()[0]} x{x} y{y}" for y in (0, 4) for x in (0, 16, 28)
    ]
    # Test and validation count each pixel once; in training a tile has all of its pixels.
    assert data.test_set.labels.sum() == 2 * 20 * 44
    assert data.train_set.labels.sum() == 8 * 6 * 16 * 16
    mask = data.test_set[5][1]
    assert (mask[:12] == IGNORED).all()
    assert (mask[:, :4] == IGNORED).all()
    assert (mask[12:, 4:] != IGNORED).all()
    with pytest.raises(DataError, match=r"0.png: pictures of these data are cut into tiles: read them by data.tiles"):
        data.picture(tmp_path / "images/0.png")
    with pytest.raises(DataError, match="cut into tiles: write their masks by data.tiles"):
        data.placed(mask, tmp_path / "images/0.png")


def test_pictures_that_are_smaller_than_a_tile(tmp_path):
    data = made(write(tmp_path), fit="tile", size=32, channels=1)
    assert_masks_are_right(data)
    image, mask = data.train_set[0]
    assert image.shape == (1, 32, 32)
    assert (mask[16:] == IGNORED).all()
    assert (mask[:, 24:] == IGNORED).all()
    assert (mask[:16, :24] != IGNORED).all()
    assert len(image[0, 16:].unique()) == 1  # the color of the border


@pytest.mark.parametrize(("height", "width", "size"), [(20, 44, 16), (60, 100, 24), (16, 24, 32)])
def test_a_picture_is_predicted_tile_by_tile(tmp_path, height, width, size):
    data = made(write(tmp_path, height=height, width=width), fit="tile", size=size, channels=1)
    path = tmp_path / "images/3.png"
    predicted = np.full(data.size_of(path), 255)
    margin = size // 8
    for tile in data.tiles(path):
        classes = (tile.image[0] / 50 + 0.4).long().numpy()
        assert (predicted[tile.place] == 255).all()
        predicted[tile.place] = classes[tile.inside]
        for k, length in ((0, height), (1, width)):
            assert tile.place[k].start == 0 or tile.inside[k].start >= margin
            assert tile.place[k].stop == length or size - tile.inside[k].stop >= margin
    assert np.array_equal(predicted, mask_of(3, height, width))
    with pytest.raises(DataError, match="3.png: pictures of these data are not cut into tiles: read them by data.pict"):
        next(made(tmp_path).tiles(path))


# Sets


def test_files_that_were_changed_are_read_again(tmp_path):
    for pixels in (lambda mask: mask, lambda mask: 2 - mask):
        write(tmp_path, pixels)
        data = made(tmp_path, fit="tile", size=24)
        data.setup("test")
        expected = pixels(mask_of(int(Path(data.keys("test")[1].split()[0]).stem)))
        assert torch.equal(data.test_set[1][1][:16], torch.from_numpy(expected))


@pytest.mark.parametrize("fit", ["crop", "tile"])
def test_sets_in_files_and_in_memory(tmp_path, fit):
    data = made(write(tmp_path), fit=fit, size=8 if fit == "tile" else 16)
    data.setup("fit")
    files = data.train_set
    memory = files.on(torch.device("cpu"))
    assert isinstance(memory, MaskSet)
    images, masks = files.__getitems__([3, 0])
    for other in (memory, pickle.loads(pickle.dumps(files))):
        assert torch.equal(other.__getitems__([3, 0])[1], masks)
        assert torch.equal(other.labels, files.labels)
    assert torch.equal(memory.__getitems__([3, 0])[0], images / 255)
    part = files.subset(np.array([3, 0]))
    assert torch.equal(part.__getitems__([0, 1])[1], masks)
    assert part.names.tolist() == files.names[[3, 0]].tolist()
    shuffled = files.with_shuffled_labels(1)
    every = list(range(len(files)))
    images, masks = shuffled.__getitems__(every)
    assert torch.equal(images, files.__getitems__(every)[0])
    assert not torch.equal(shuffled.labels, files.labels)
    assert torch.equal(shuffled.labels, torch.stack([(masks == k).flatten(1).sum(1) for k in range(3)], 1))


@pytest.mark.parametrize("name", ["rotate", "zoom", "erase", "shift", "flip", "color"])
def test_augmentations_move_both(tmp_path, name):
    write(tmp_path, height=64, width=64)
    for i in range(COUNT):  # coarse blocks, brighter by class; in color, so that "color" changes them
        mask = np.random.default_rng(i).integers(0, 2, (4, 4)).repeat(16, 0).repeat(16, 1).astype(np.uint8)
        Image.fromarray(np.stack([100 + 100 * mask, 100 + 101 * mask, 100 + 100 * mask], 2)).save(
            tmp_path / f"images/{i}.png"
        )
        Image.fromarray(mask).save(tmp_path / f"masks/{i}.png")
    data = made(tmp_path, augmentations=[name])
    data.setup("fit")
    images, masks = data.train_set.__getitems__(list(range(8)))
    torch.manual_seed(0)
    moved, targets = data.augmented((images, masks))
    assert (targets.dtype, targets.shape) == (torch.int64, masks.shape)
    if name == "color":
        assert torch.equal(targets, masks)
        assert not torch.equal(moved, images / 255)
        return
    assert not torch.equal(targets, masks)
    counted = targets != IGNORED
    shown = ((moved[:, 0] * 255 - 100) / 100).round()
    right = (shown[counted] == targets[counted]).float().mean()
    assert right > (0.99 if name == "rotate" else 0.998)  # the rest lies between two blocks, or beside the image
    if name in ("rotate", "erase"):
        assert (moved[:, 0][~counted] < 0.4).all()  # black, or next to what is
        assert 0.01 < (~counted).float().mean() < 0.3
    if name in ("zoom", "flip"):
        assert counted.float().mean() > 0.999


def test_zoomed_masks_lie_on_their_images(tmp_path):
    data = made(write(tmp_path), size=64, augmentations=["zoom"])
    torch.manual_seed(0)
    blocks = torch.rand(64, 1, 16, 16).round().repeat_interleave(4, 2).repeat_interleave(4, 3)
    images, masks = data.augmented((blocks, blocks[:, 0].long()))
    assert ((images[:, 0] > 0.5) == masks).float().mean() > 0.995  # 0.992 half a pixel beside


# What cannot be used


def test_layouts_that_do_not_fit(tmp_path):
    expected = "expected a folder with images/NAME.png and masks/NAME.png, or with folders train, val and test that"
    assert f"{tmp_path / 'no'} is not a folder: {expected}" in error_of(tmp_path / "no")
    assert f"{tmp_path}: there is no folder images in it: {expected}" in error_of(tmp_path)
    (tmp_path / "images").mkdir()
    assert f"{tmp_path}: there are no pictures in images: {expected}" in error_of(tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "images/a.png")
    assert f"{tmp_path}: there is no folder masks in it: {expected}" in error_of(tmp_path)
    with pytest.raises(DataError, match="data.folder is missing"):
        MaskFolder().prepare_data()


def test_pictures_and_masks_without_each_other(tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "masks/3.png").unlink()
    Image.new("L", (8, 8)).save(tmp_path / "masks/extra.png")
    assert error_of(tmp_path) == (
        f"{tmp_path}: 1 picture without a mask: images/3.png: a mask has the name of its picture, perhaps with _mask, "
        "_label, _seg behind it: add the masks, or leave such pictures out by --data.skip_bad true"
    )
    data = made(tmp_path, skip_bad=True)
    data.setup()
    assert len(data.parts) == COUNT - 1
    said = capsys.readouterr().err
    assert f"{tmp_path}: left out 1 picture without a mask: images/3.png" in said
    assert f"{tmp_path}: left out 1 mask without a picture: masks/extra.png" in said
    Image.new("L", (8, 8)).save(tmp_path / "images/1.bmp")
    assert error_of(tmp_path).startswith(f"{tmp_path}/images/1.png: 1.bmp has the same name: keep one")


def test_a_mask_of_another_size(tmp_path, capsys):
    write(tmp_path)
    Image.new("L", (24, 17)).save(tmp_path / "masks/4.png")
    line = f"{tmp_path}/masks/4.png: is 24 x 17, and its picture 4.png 24 x 16: give both one size"
    assert error_of(tmp_path) == line + ", or leave such files out by --data.skip_bad true"
    made(tmp_path, skip_bad=True).setup()
    assert "left out 1 picture that cannot be read: images/4.png" in capsys.readouterr().err


def test_a_mask_of_a_picture_that_its_metadata_turns(tmp_path):
    write(tmp_path)
    picture = Image.open(tmp_path / "images/4.png")
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "images/4.png", exif=exif)
    line = f"{tmp_path}/masks/4.png: is 24 x 16, and its picture 4.png 16 x 24, as its metadata turns it: turn the mask"
    assert error_of(tmp_path).startswith(line)
    Image.open(tmp_path / "masks/4.png").transpose(Image.Transpose.ROTATE_270).save(tmp_path / "masks/4.png")
    made(tmp_path).setup()


def test_letters_of_macos_in_the_name_of_a_mask(tmp_path):
    write(tmp_path)
    for folder, form in (("images", "NFC"), ("masks", "NFD")):
        (tmp_path / folder / "4.png").rename(tmp_path / folder / unicodedata.normalize(form, "für.png"))
    data = made(tmp_path)
    data.setup()
    assert len(data.parts) == COUNT


def test_a_missing_mask_where_masks_have_an_ending(tmp_path):
    write(tmp_path, mask_name="{}_mask.png")
    (tmp_path / "masks/3_mask.png").unlink()
    assert error_of(tmp_path).startswith(f"{tmp_path}: 1 picture without a mask: images/3.png: ")
    data = made(tmp_path, skip_bad=True)
    data.setup()
    assert len(data.parts) == COUNT - 1


@pytest.mark.parametrize("which", ["images", "masks"])
def test_damaged_files(tmp_path, which):
    write(tmp_path)
    path = tmp_path / which / "5.png"
    path.write_bytes(path.read_bytes()[:60])
    assert error_of(tmp_path).startswith(f"{path} is not a picture that can be read (")
    data = made(tmp_path, skip_bad=True)
    data.setup()
    assert sum(len(x) for x in (data.train_set, data.val_set, data.test_set)) == COUNT - 1


def test_values_that_do_not_fit(tmp_path):
    write(tmp_path)
    assert error_of(tmp_path, values=[0, 1]).endswith(
        "which is no class: add it to data.values, set data.ignore to it, or mend the mask (and 11 more: "
        + ", ".join(f"images/{i}.png" for i in sorted(map(str, range(COUNT)))[1:])
        + ")"  # and no advice to leave out all
    )
    assert error_of(tmp_path, values=[0, 1]).startswith(f"{tmp_path}/masks/0.png: has the value 2 in row ")
    row, column = np.argwhere(mask_of(0) == 2)[0]
    assert f"value 2 in row {row} and column {column}, " in error_of(tmp_path, values=[0, 1])
    made(tmp_path, values=[0, 1], ignore=2).setup()
    assert error_of(tmp_path, class_names=["a", "b"]) == (
        f"{tmp_path}: masks have 3 values, 0, 1, 2, and data.class_names has 2 names: give one for each value, in this "
        "order"
    )
    assert error_of(tmp_path, ignore="ff0000") == (
        f"data.ignore is 'ff0000', and the masks in {tmp_path} have numbers: give a number"
    )
    write(tmp_path, lambda mask: mask * 0 + 3)
    assert "masks that can be read have one class alone, the value 3: at least two" in error_of(tmp_path)
    assert "masks that can be read have no value that counts: at least two" in error_of(tmp_path, ignore=3)


def test_too_few_pictures(tmp_path):
    write(tmp_path)
    for i in range(2, COUNT):
        (tmp_path / f"images/{i}.png").unlink()
    assert error_of(tmp_path) == f"{tmp_path}: has no picture to test on: it needs three pictures to be split"


def test_too_many_values(tmp_path, capsys):
    write(tmp_path)
    smooth = np.arange(16 * 24, dtype=np.uint8).reshape(16, 24) % 200
    Image.fromarray(smooth).save(tmp_path / "masks/7.png")
    assert error_of(tmp_path) == (
        f"{tmp_path}/masks/7.png: masks have more than 64 values, here 0, 1, 2, ... (65): smoothed edges, JPEG, and a "
        "number for each object make many: save masks as PNG with one value for each class, or, if all are classes, "
        "list them in data.values"
    )
    assert "masks/7.png: has the value 3 in row 0 and column 3, which is no class" in error_of(
        tmp_path, values=[0, 1, 2]
    )
    data = made(tmp_path, skip_bad=True, size=16)
    assert data.values == [0, 1, 2]
    data.setup()
    assert "left out 1 picture that cannot be read: images/7.png" in capsys.readouterr().err
    write(tmp_path, lambda mask: smooth)
    assert "masks have more than 64 values, here 0, 1, 2" in error_of(tmp_path, skip_bad=True)


def test_colors_where_numbers_are_expected(tmp_path):
    write(tmp_path, lambda mask: COLORS[mask])
    assert "has colors, and the values of the classes are numbers: give data.values as colors in quotes, such as" in (
        error_of(tmp_path, values=[0, 1], channels=1)
    )
    assert "masks/0.png: has the value '0000ff' in row " in error_of(tmp_path, values=["000000", "ff0000"])
    write(tmp_path)
    for i in range(COUNT):
        Image.fromarray(mask_of(i).astype(np.float32) / 2).save(tmp_path / "masks" / f"{i}.tif")
        (tmp_path / "masks" / f"{i}.png").unlink()
    line = "masks/0.tif: has values that are no whole numbers of at most 32 bits: "
    assert line in error_of(tmp_path, values=[0, 1])
    for number in (1e20, -1e20, 2.0**31):
        Image.fromarray(np.full((16, 24), number, np.float32)).save(tmp_path / "masks/0.tif")
        assert line in error_of(tmp_path, values=[0, 1])


def test_a_value_of_few_pixels_may_be_a_mistake(tmp_path, capsys):
    write(tmp_path)
    mask = mask_of(0)
    mask[0, 0] = 77
    Image.fromarray(mask).save(tmp_path / "masks/0.png")
    for i in range(30 * 400 // mask.size):
        Image.fromarray(mask_of(0)).save(tmp_path / f"masks/more{i}.png")
        Image.fromarray(mask_of(0)).save(tmp_path / f"images/more{i}.png")
    made(tmp_path, size=16).prepare_data()
    assert "nearly no pixel has the value 77: if such pixels are mistakes" in capsys.readouterr().err


def test_a_deep_gray_mask_among_colors(tmp_path):
    write(tmp_path, lambda mask: COLORS[mask])
    Image.fromarray(mask_of(5).astype(np.uint16) * 300).save(tmp_path / "masks/5.png")
    assert error_of(tmp_path, size=16).startswith(
        f"{tmp_path}/masks/5.png: has the number 600, and the values of the classes are colors: "
    )


def test_an_ignored_color_that_became_a_number(tmp_path, capsys):
    write(tmp_path, lambda mask: COLORS[mask])
    made(tmp_path, ignore=0b1010, size=16).prepare_data()
    assert (
        f"{tmp_path}: no mask has the value of data.ignore, '000010': it was given as a number: write a color in "
        """quotes within quotes, such as --data.ignore '"ff0000"'\n""" in capsys.readouterr().err
    )
    made(tmp_path, ignore="00000a", size=16).prepare_data()
    assert f"{tmp_path}: no mask has the value of data.ignore, '00000a'\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"values": [1]}, r"values must be from 2 to 255 different ones, got \[1\]"),
        ({"values": [1, 1]}, "values must be from 2 to 255 different ones"),
        ({"values": ["red", "blue"]}, "values must be numbers, or colors such as \"ff0000\", got 'red'"),
        ({"values": [0, 1], "ignore": 1}, "ignore must be another value than those of values, and of their kind"),
        ({"values": [0, 1], "ignore": "ff0000"}, "ignore must be another value than those of values, and of their"),
        ({"values": ["000000", "ff0000"], "ignore": 0}, "ignore must be another value than those of values"),
        ({"values": [0, 1], "class_names": ["a", "b", "c"]}, "class_names must be one for each of the 2 values"),
        ({"ignore": "grey"}, "ignore must be numbers, or colors"),
        ({"values": [0, 2**40]}, "values must be numbers from -2147483648 to 2147483647, or colors .* 1099511627776"),
        ({"ignore": -(2**40)}, "ignore must be numbers from -2147483648 to"),
    ],
)
def test_arguments_that_do_not_fit(options, line):
    with pytest.raises(ValueError, match=line):
        MaskFolder(**options)
