"""Sentiment of your own texts: from a table to the probabilities of new texts.

    python examples/sentiment.py reviews.csv

The table is CSV, TSV or JSON lines, and has the columns `text` and `label`; without one, the script takes the 60
invented reviews beside it. The command line does the same, with early stopping, checkpoints and predictions:

    torchcaps train own/texts --data.file reviews.csv
"""

import sys
from functools import partial
from pathlib import Path

import torch
from lightning import Trainer, seed_everything

from torchcaps import HeinsenRouting, create_model
from torchcaps.data import Encoder, TextTable
from torchcaps.training import Classifier

INVENTED = Path(__file__).with_name("reviews.csv")


def main(file: str, epochs: int = 30, **options: str) -> dict[str, float]:
    seed_everything(0)
    data = TextTable(file, text="text", label="label", val_share=0.15, test_share=0.25, batch_size=10, **options)

    # A frozen encoder gives every token several embeddings, one per layer. Each is a capsule, and they are routed to
    # one capsule per class. `facts` has the number of classes, and of the encoder's layers and their width.
    routing = HeinsenRouting(iterations=3, init="paper")
    network = create_model("heinsen_sst", **data.network_arguments(), routing=routing)
    optimizer = partial(torch.optim.RAdam, lr=0.005)
    model = Classifier(network, torch.nn.CrossEntropyLoss(), data.classes, optimizer)

    trainer = Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, data)

    texts = ["What a delightful evening, we loved it.", "Nobody should pay for this mess."]
    embedded = Encoder(data.encoder, cache=data.cache, truncate=True).embed(texts)
    network.eval()
    with torch.inference_mode():
        probabilities = network(*embedded.padded([0, 1])).scores.softmax(-1)
    for text, row in zip(texts, probabilities, strict=True):
        print(text, {name: f"{value:.2f}" for name, value in zip(data.names, row.tolist(), strict=True)})
    return metrics


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(INVENTED))
