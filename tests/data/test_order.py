"""Orders of samples and random numbers in batches: they depend on seed, epoch and batch, not on what came before."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from torchcaps.data import Digits
from torchcaps.data.order import AsStored, ByLength, NewImages, Order, evenly_chosen

LENGTHS = np.random.default_rng(0).integers(1, 30, 41)
LABELS = torch.tensor([0] * 27 + [5] * 3 + [2] * 11)  # sorted, of unequal classes, whose numbers have gaps


class Balanced(Order):
    def __init__(self, *options, **named) -> None:
        super().__init__(*options, labels=LABELS, **named)


class BalancedByLength(ByLength):
    def __init__(self, *options, **named) -> None:
        super().__init__(*options, labels=LABELS, **named)


def an_order(kind: type[Order] = Order, samples: int = 41, batch_size: int = 4, seed: int = 7, **options) -> Order:
    if issubclass(kind, ByLength):
        return kind(LENGTHS[:samples], batch_size, seed, **options)
    return kind(samples, batch_size, seed, **options)


def epoch_of(order: Order, epoch: int) -> list[int]:
    order.set_epoch(epoch)
    return list(order)


every_kind = pytest.mark.parametrize("kind", [Order, ByLength, NewImages, Balanced, BalancedByLength])
shuffled = pytest.mark.parametrize("kind", [Order, ByLength, Balanced, BalancedByLength])
balanced = pytest.mark.parametrize("kind", [Balanced, BalancedByLength])


@pytest.mark.parametrize(("total", "count"), [(11_001, 10_997), (5, 9), (1, 3), (0, 2)])
def test_evenly_chosen_indices_are_all_different(total, count):
    chosen = evenly_chosen(total, count)
    assert len(set(chosen)) == len(chosen) == min(total, count)
    assert chosen == sorted(chosen)
    assert chosen[:1] + chosen[-1:] == [0, total - 1] * (total > 0)


@pytest.mark.parametrize("kind", [Order, ByLength])
def test_every_sample_once_per_epoch(kind):
    order = an_order(kind)
    for epoch in range(3):
        assert sorted(epoch_of(order, epoch)) == list(range(41))


@balanced
def test_a_balanced_epoch_has_equally_many_of_each_class(kind):
    """41 samples of three classes: 14, 14 and 13, and each class has the 13 once in three epochs."""
    order = an_order(kind)
    counts = [LABELS[epoch_of(order, epoch)].bincount()[[0, 2, 5]].tolist() for epoch in range(3)]
    assert [sorted(of_classes) for of_classes in counts] == [[13, 14, 14]] * 3
    assert [sum(of_class) for of_class in zip(*counts, strict=True)] == [41] * 3


@balanced
def test_samples_of_a_class_come_in_turn(kind):
    """After any number of epochs, no sample has come twice more than another one of its class."""
    order, taken = an_order(kind), torch.zeros(41, dtype=torch.long)
    for epoch in range(9):
        taken += torch.tensor(epoch_of(order, epoch)).bincount(minlength=41)
        for k in (0, 2, 5):
            of_class = taken[LABELS.eq(k)]
            assert of_class.max() - of_class.min() <= 1, (epoch, k)
    assert taken[LABELS == 0].min() == 4  # 9 epochs of 41 / 3 of 27
    pairs = {tuple(sorted(set(epoch_of(order, epoch)) & set(range(27)))) for epoch in (0, 2, 4)}
    assert len(pairs) == 3  # each turn of a class is in another order


@balanced
def test_classes_of_a_balanced_epoch_are_mixed(kind):
    labels = LABELS[torch.tensor(epoch_of(an_order(kind), 0))]
    assert (labels[3:] == labels[:-3]).float().mean() < 0.7  # all are equal where the classes come in turn


def test_one_sample_fills_half_of_a_balanced_epoch():
    labels = torch.zeros(100_001, dtype=torch.long)
    labels[7] = 1
    found = torch.tensor(epoch_of(Order(100_001, 4, 7, labels=labels), 3))
    assert abs(int((found == 7).sum()) - 50_000) <= 1
    assert len(found.unique()) >= 50_000


@every_kind
def test_an_order_follows_from_the_epoch(kind):
    order, other = an_order(kind), an_order(kind)
    torch.manual_seed(3)
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    torch.manual_seed(4)
    assert [epoch_of(other, epoch) for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other.set_epoch(0)
    assert [list(other) for _ in range(3)] == epochs  # one after the other


@shuffled
def test_another_seed_gives_another_order(kind):
    orders = {tuple(epoch_of(an_order(kind, seed=seed), epoch)) for seed in (0, 1, -1, 2**63 - 1) for epoch in (0, 1)}
    assert len(orders) == 8


def test_an_order_draws_nothing():
    before = torch.get_rng_state()
    list(an_order())
    list(an_order(BalancedByLength))
    assert torch.equal(torch.get_rng_state(), before)


@every_kind
@pytest.mark.parametrize("processes", [1, 3])
def test_an_iteration_begins_at_its_position(kind, processes):
    for rank in range(processes):
        options = {"processes": processes, "rank": rank}
        whole = epoch_of(an_order(kind, **options), 2)
        for batch in range(4):
            resumed = an_order(kind, **options, position=lambda batch=batch: (2, batch))
            assert list(resumed) == whole[4 * batch :]


@every_kind
def test_after_a_position_the_next_epoch_is_whole(kind):
    place = [(2, 5)]
    order = an_order(kind, position=lambda: place.pop() if place else None)
    assert len(list(order)) == 41 - 20
    assert list(order) == epoch_of(an_order(kind), 3)


@shuffled
@pytest.mark.parametrize("processes", [2, 3, 4, 50])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_processes_share_the_batches_of_one(kind, processes, batch_size):
    """Batch k of all processes is batch k of a single process whose batches are as large; none is there twice."""
    size = batch_size * processes
    alone = epoch_of(an_order(kind, batch_size=size), 1)
    orders = [an_order(kind, batch_size=batch_size, processes=processes, rank=rank) for rank in range(processes)]
    shares = [epoch_of(order, 1) for order in orders]
    assert [len(share) for share in shares] == [len(order) for order in orders]
    assert {math.ceil(len(share) / batch_size) for share in shares} == {math.ceil(41 / size)}  # none waits for another
    for k, start in enumerate(range(0, 41, size)):
        own = []
        for order, share in zip(orders, shares, strict=True):
            count, together = order.share(k)
            taken = share[k * batch_size : (k + 1) * batch_size]
            assert together == len(alone[start : start + size])
            assert len(taken) == max(count, 1)
            own += taken[:count]
        assert sorted(own) == sorted(alone[start : start + size])


def test_a_test_is_in_the_order_of_the_data():
    orders = [AsStored(7, 2, 0, 3, rank) for rank in range(3)]
    assert [list(order) for order in orders for _ in range(2)] == [[0, 3, 6]] * 2 + [[1, 4, 0]] * 2 + [[2, 5, 1]] * 2
    assert [[order.share(k) for k in range(2)] for order in orders] == [
        [(2, 6), (1, 1)],
        [(2, 6), (0, 1)],
        [(2, 6), (0, 1)],
    ]


def test_batches_are_of_about_equal_length():
    def spread(order: Order) -> float:
        return sum(int(np.ptp(LENGTHS[batch.numpy()])) for batch in order.of_process(0).split(4))

    assert spread(an_order(ByLength)) < spread(an_order()) / 3
    firsts = LENGTHS[an_order(ByLength).of_process(0)[::4].numpy()]
    assert firsts.tolist() != sorted(firsts)  # the batches are in a random order


def test_new_images_are_new_in_every_epoch():
    order = an_order(NewImages)
    assert [epoch_of(order, epoch) for epoch in (0, 3)] == [list(range(41)), list(range(123, 164))]
    shares = [epoch_of(an_order(NewImages, processes=2, rank=rank), 1) for rank in range(2)]
    assert sorted({sample for share in shares for sample in share}) == list(range(41, 82))


# Loaders


class Few(Digits):
    """Sixteen images, identified by their brightest pixel."""

    def load(self, train: bool) -> tuple[Tensor, Tensor]:
        images = torch.zeros(16, 1, 8, 8, dtype=torch.uint8)
        images[:, :, 4, 4] = torch.arange(16)[:, None]
        return images, torch.arange(16) % 10


def samples_of(data: Few) -> list[int]:
    return [round(float(image.max()) * 255) for images, _ in data.train_dataloader() for image in images]


def few(**options: int) -> Few:
    data = Few(batch_size=4, **options)
    data.setup("fit")
    return data


def test_the_seed_of_a_loader_of_ones_own_is_that_of_torch():
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(samples_of(few()))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(16))


def test_a_new_loader_for_every_epoch_goes_on():
    data, again = few(), few()
    loader = data.train_dataloader()
    both = [[labels.tolist() for _, labels in loader] for _ in range(2)]
    assert both[0] != both[1]
    assert [[labels.tolist() for _, labels in again.train_dataloader()] for _ in range(2)] == both


# Random numbers in a batch


class Draws(LightningModule):
    """Records the images and a random number in each step, and draws `waste` more numbers."""

    def __init__(self, waste: int) -> None:
        super().__init__()
        self.weight, self.waste = torch.nn.Parameter(torch.zeros(())), waste
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.seen.append(torch.cat([batch[0].flatten(), torch.rand(3)]))
        torch.rand(self.waste)
        return self.weight * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def seen_in_training(seed: int = 0, waste: int = 0, **options: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model = Draws(waste)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet)
    trainer.fit(model, Few(batch_size=4, shift=2, **options))
    return model.seen


def alike(some: list[Tensor], others: list[Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(some, others, strict=True)]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about loaders and loggers
def test_draws_follow_from_seed_epoch_and_batch():
    seen = seen_in_training()
    assert len({tuple(batch[-3:].tolist()) for batch in seen}) == len(seen) == 8
    assert all(alike(seen_in_training(waste=5), seen))
    assert all(alike(seen_in_training(num_workers=1), seen))
    assert not any(alike(seen_in_training(seed=1), seen))


def draw(epoch: int, batch: int, rank: int, seed: int = 0, training: bool = True) -> Tensor:
    """The random number for a batch, with a stand-in for the Trainer of one of several processes."""
    epochs = SimpleNamespace(current=SimpleNamespace(ready=epoch + 1, processed=epoch))
    batches = SimpleNamespace(current=SimpleNamespace(ready=batch))
    data = few()
    data.trainer = SimpleNamespace(
        training=training,
        world_size=2,
        global_rank=rank,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=batches)),
    )
    data.load_state_dict({"seed": seed})
    data.on_before_batch_transfer((), 0)
    return torch.rand(3)


def test_each_process_draws_its_own():
    places = list(itertools.product(range(3), range(3), range(2)))
    drawn = [draw(*place) for place in places]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(places)
    assert all(alike([draw(*place) for place in reversed(places)], drawn[::-1]))
    assert not any(alike([draw(*place, seed=1) for place in places], drawn))


def test_only_training_is_seeded():
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(draw(0, 0, 0, training=False), first)
