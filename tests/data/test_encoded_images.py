"""Images as states of a frozen encoder: values, batches of a Trainer, validation, errors."""

import shutil

import pytest
import torch
import transformers
from commands import call
from encoders import make_encoder, make_image_encoder
from PIL import Image

from torchcaps.data import CIFAR10, MNIST, DataError, EncodedImages, ImageFolder
from torchcaps.data.encoded_images import ImageEncoder

# Warnings of Lightning's own imports with this version of torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_image_encoder(tmp_path_factory.mktemp("encoder") / "vit")


def test_states_are_those_of_the_model(encoder):
    images = torch.rand(3, 3, 8, 8)
    states = ImageEncoder(str(encoder)).encode(images)
    assert states.shape == (3, 5, 3, 8)  # four patches and the class token; the input and two layers
    assert not states.requires_grad
    model = transformers.ViTModel.from_pretrained(encoder).eval()
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in ([0.5, 0.4, 0.3], [0.5, 0.2, 0.1]))
    expected = model((images - mean) / std, output_hidden_states=True).hidden_states
    for k, state in enumerate(expected):
        torch.testing.assert_close(states[:, :, k], state.detach())


def test_a_data_set_of_states(encoder, images_of_noise, tmp_path):
    data = EncodedImages(CIFAR10(root=str(images_of_noise), val_size=10), str(encoder), batch_size=4)
    assert (data.classes, data.names[0]) == (10, "airplane")
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert labels.shape == (4,)
    assert data.states(images).shape == (4, 5, 3, 8)
    assert len(data.val_dataloader().dataset) == 10
    assert EncodedImages(CIFAR10(root=str(images_of_noise))).val_dataloader() == []
    for i in range(20):
        path = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(path)
    own = EncodedImages(ImageFolder(str(tmp_path / "pictures")), str(encoder))
    own.setup("fit")
    assert len(own.val_dataloader().dataset) == len(own.val_set) > 0
    assert own.names == ["a", "b"]
    assert own.title == own.images.title
    assert own.keys("fit") == own.images.keys("fit")
    assert own.keys("fit")[0].endswith(".png")
    assert len(own.write_split(tmp_path).read_text().splitlines()) == 21
    assert not hasattr(data, "write_split")
    shuffled = EncodedImages(CIFAR10(root=str(images_of_noise)), str(encoder), shuffle_labels=True)
    shuffled.setup()
    assert sorted(shuffled.train_set.labels) == sorted(shuffled.images.train_set.labels)
    assert torch.equal(shuffled.test_set.labels, data.test_set.labels)


def train(encoder, *arguments):
    sizes = ["--model.network.layers=3", "--model.network.width=8"]
    command = ["train", "heinsen2022/images/cifar10", "--smoke", "--small", f"--data.encoder={encoder}"]
    return call(*command, *(arguments or sizes))


def test_a_head_is_trained_on_states(encoder, images_of_noise, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.chdir(tmp_path)
    assert train(encoder) == 0
    # No weights of the encoder are trained or kept.
    state = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert state["global_step"] == 2
    assert {name.split(".")[1] for name in state["state_dict"]} == {"depth_scale", "depth_offset", "capsules"}
    assert train(encoder, "--model.network.layers=4") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has 3 layers of 8, and the network takes 4 of 192: set model.network.layers=3 and model" in said


def test_what_cannot_be_encoded(encoder, tmp_path):
    with pytest.raises(ValueError, match="images must have 3 channels for an encoder, got 1"):
        EncodedImages(MNIST())
    with pytest.raises(ValueError, match="revision is for models on the Hub"):
        ImageEncoder(str(encoder), revision="main")
    with pytest.raises(ValueError, match="ten_crop=False"):
        EncodedImages(CIFAR10(resize=34, ten_crop=True))
    for folder in (tmp_path, make_encoder(tmp_path / "bert")):
        with pytest.raises(DataError, match="is not an encoder of images that transformers can load") as caught:
            ImageEncoder(str(folder))
        assert "\n" not in str(caught.value)
    broken = shutil.copytree(encoder, tmp_path / "broken")
    (broken / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.4, 0.3], "image_std": [0, 0, 0]}')
    with pytest.raises(DataError, match=r"has image_std = \[0, 0, 0\]: expected 3 numbers from 0.001 to 1, one of"):
        ImageEncoder(str(broken))
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], image_size=8)
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    (tmp_path / "resnet" / "preprocessor_config.json").write_text((encoder / "preprocessor_config.json").read_text())
    config = (tmp_path / "resnet" / "config.json").read_text()
    (tmp_path / "resnet" / "config.json").write_text(config.replace('"image_size": 8', '"image_size": 1000000'))
    with pytest.raises(DataError, match="has images of size 1000000: expected an int from 1 to 10,000"):
        ImageEncoder(str(tmp_path / "resnet"))
    (tmp_path / "resnet" / "config.json").write_text(config)
    with pytest.raises(DataError, match="have states of different shapes"):
        ImageEncoder(str(tmp_path / "resnet")).encode(torch.rand(1, 3, 8, 8))


def test_an_epoch_is_balanced_as_that_of_the_images(encoder, tmp_path):
    for i in range(40):
        path = tmp_path / "pictures" / ("a" if i < 36 else "b") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(path)
    for balance, expected in ((False, [26, 2]), (True, [14, 14])):
        data = EncodedImages(ImageFolder(str(tmp_path / "pictures"), balance=balance), str(encoder))
        data.setup("fit")
        assert torch.cat([labels for _, labels in data.train_dataloader()]).bincount().tolist() == expected
