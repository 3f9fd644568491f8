"""Vision models of transformers with a few thousand random weights, in folders that Hugging Face reads."""

import json
from pathlib import Path

import torch
import transformers

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WIDTHS = {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
MEAN, STD = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]


def make_vision_model(folder: Path, kind: str = "ViT", size: int = 32, **options: object) -> Path:
    """Write a model with its image processor's values and return its folder.

    Args:
        folder: folder to create.
        kind: beginning of the name of its configuration in transformers.
        size: height and width of its images.
        options: values of its configuration.
    """
    torch.manual_seed(0)
    make = getattr(transformers, f"{kind}Config")
    model = transformers.AutoModel.from_config(make(**options))
    model.save_pretrained(folder)
    values = {"image_mean": MEAN, "image_std": STD, "size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return folder
