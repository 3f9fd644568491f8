"""Loading the weights of Heinsen's heads of 2022: the heads against the paper's algorithm in plain loops, and errors.

No published file is at hand. Files of random values with the names and shapes of the author's classes take their place.
"""

import oracles
import pytest
import torch
from state_dicts import assert_holds, assert_refuses_other_files, assert_stays_as_it_was, edited, error_of

from torchcaps.models import VectorRoutingHead, heinsen_texts, load_authors_head

SIZES = {"layers": 3, "width": 6, "hidden": 4, "pose": 5, "classes": 3}


def route_shapes(children, parents, d, h):
    """Names and shapes of one routing in the author's code; children is None for any number."""
    n = children or 1
    shapes = {
        "CONST_ones_over_n_out": (parents,),
        **{"W_A": (n, d), "B_A": (n,)},
        **{"W_F1": (parents, d), "W_F2": (d, h), "B_F2": (parents, h)},
        **{"W_G1": (h, d), "W_G2": (parents, d), "B_G2": (parents, d)},
        **{"W_S": (n, parents), "B_S": (n, parents)},
    }
    if children:
        return shapes | {"beta_use": (children, parents), "beta_ign": (children, parents)}
    for beta in ("compute_beta_use", "compute_beta_ign"):
        shapes |= {f"{beta}.weight": (parents, d), f"{beta}.bias": (parents,)}
    return shapes


def shapes_of(layers, width, hidden, pose, classes):
    """Names and shapes of the author's head."""
    routes = ((None, hidden, width, pose), (hidden, hidden, pose, pose), (hidden, classes, pose, 1))
    shapes = {"W": (layers, width), "B": (layers, width)}
    for k, sizes in enumerate(routes):
        shapes |= {f"route.{k}.{name}": shape for name, shape in route_shapes(*sizes).items()}
    return shapes


def alike(seed=0, **sizes):
    """A state dict with the names and shapes of a published one and random values."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: 0.6 * torch.randn(shape, generator=generator) for name, shape in shapes_of(**sizes).items()}
    constants = {name: torch.ones_like(x) / len(x) for name, x in state.items() if "CONST" in name}
    return state | constants


@pytest.fixture
def file(tmp_path):
    torch.save(alike(**SIZES), tmp_path / "head.state_dict")
    return tmp_path / "head.state_dict"


# The head written out from the paper in plain loops, for one text without padding


def normalized(x):
    return (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt() if len(x) > 1 else x


def by_hand(w, states):
    """Return the scores of one text, whose states are `(positions, layers, width)`."""
    x = [normalized(e) * w["W"][k] + w["B"][k] for position in states for k, e in enumerate(position)]
    for k in range(3):
        x = route({name[8:]: value for name, value in w.items() if name.startswith(f"route.{k}.")}, x)
    return torch.cat(x)


NAMES = {  # of the oracle's parameters in the author's code
    **{"activation_weight": "W_A", "activation_bias": "B_A"},
    **{"vote_scale": "W_F1", "vote_weight": "W_F2", "vote_bias": "B_F2"},
    **{"prediction_weight": "W_G1", "prediction_scale": "W_G2", "prediction_bias": "B_G2"},
    **{"similarity_weight": "W_S", "similarity_bias": "B_S", "beta_use": "beta_use", "beta_ignore": "beta_ign"},
    **{f"beta_{kind}.{x}": f"compute_beta_{kind[:3]}.{x}" for kind in ("use", "ignore") for x in ("weight", "bias")},
}


def route(w, x):
    """Route a list of vectors as in Algorithm 2, with two iterations."""
    learned = {ours: w[theirs].tolist() for ours, theirs in NAMES.items() if theirs in w}
    vectors = [[vector.tolist() for vector in x]]
    out = oracles.heinsen_vector_routing(vectors, learned, 2, len(w["B_F2"]), gates=[[1.0] * len(x)])
    return list(torch.tensor(out["poses"][0], dtype=torch.float64))


@pytest.mark.parametrize("sizes", [SIZES, {**SIZES, "layers": 1, "pose": 6}, {**SIZES, "hidden": 2, "classes": 2}])
@torch.no_grad()
def test_by_hand(tmp_path, sizes):
    path = tmp_path / "head.state_dict"
    torch.save(alike(1, **sizes), path)
    weights = {name: x.double() for name, x in torch.load(path, weights_only=True).items()}
    network = load_authors_head(path).double()
    states = torch.randn(4, 3, sizes["layers"], 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [3, 1, 2, 3]
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    expected = torch.stack([by_hand(weights, text[:n]) for text, n in zip(states, lengths, strict=True)])
    assert expected.std() > 1e-2
    torch.testing.assert_close(network(states, mask).scores, expected, rtol=1e-10, atol=1e-10)


# Loading


def test_every_value_is_loaded(file):
    network = load_authors_head(file)
    assert type(network) is VectorRoutingHead
    assert_holds(network, file)


def test_a_file_in_the_home_folder(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert_holds(load_authors_head(f"~/{file.name}"), file)


def test_loads_into_a_given_head(file):
    network = heinsen_texts(**SIZES).double()
    assert load_authors_head(str(file), network) is network
    assert network.depth_scale.dtype == torch.float64
    torch.testing.assert_close(network.depth_offset, torch.load(file, weights_only=True)["B"].double())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W2": torch.ones(1)}, "has the weights of another network: W2 has shape (1,) there, expected none"),
        ({"B": None}, "depth_offset has shape none there, expected (3, 6)"),
        ({"route.2.W_S": torch.ones(4, 2)}, "routing.similarity_weight has shape (4, 2) there, expected (4, 3)"),
        ({"W": torch.ones(3)}, "is not one of the author's heads, which have a matrix W:"),
    ],
)
def test_files_that_do_not_fit(file, changes, message):
    assert message in error_of(load_authors_head, edited(file, changes))


def test_a_head_that_does_not_fit_stays_as_it_was(file):
    assert_stays_as_it_was(load_authors_head, file, heinsen_texts(**{**SIZES, "classes": 4}), "expected (4,")


def test_other_files(tmp_path):
    assert_refuses_other_files(load_authors_head, tmp_path, "is not one of the author's heads")
