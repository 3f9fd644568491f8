"""Text encoders with a few hundred random weights, in folders that Hugging Face reads."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

WORDS = ["a", "good", "bad", "film", "is", "not", "very", ",", "."]


def make_encoder(folder: Path, kind: str = "bert", seed: int = 0) -> Path:
    """Write an encoder with two layers of width 8 and return its folder.

    Args:
        folder: folder to create.
        kind: "bert", an encoder whose tokenizer adds [CLS] and [SEP]; "gpt2", a decoder whose tokenizer adds nothing;
            or "t5", an encoder and a decoder.
        seed: seed of the weights.
    """
    torch.manual_seed(seed)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    if kind == "bert":
        folder.mkdir(parents=True)
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=12)
        config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=12, **small)
        model = transformers.BertModel(config)
    else:
        words = Tokenizer(WordLevel({word: i for i, word in enumerate(["<end>", "<unk>", *WORDS])}, unk_token="<unk>"))
        words.pre_tokenizer = WhitespaceSplit()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=len(tokenizer), n_positions=12, n_layer=2, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0
            )
            model = transformers.GPT2Model(config)
        else:
            config = transformers.T5Config(
                vocab_size=len(tokenizer),
                d_model=8,
                d_kv=4,
                d_ff=8,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
            model = transformers.T5Model(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_image_encoder(folder: Path) -> Path:
    """Write an encoder of images of 8x8 pixels, two layers of width 8, patches of 4x4; return its folder."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=8, image_size=8, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.2, 0.1]}')
    return folder
