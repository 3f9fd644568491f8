"""Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018).

networks.py         EncapNet, CapNet, and the CNNs beside them
encapsulated.py     capsule layers without routing; relu_squash.py is the end of each branch
feedback.py         feedback agreement, a regularizer; agreement_unit.py is the loss of one pair of layers
transport.py        optimal transport and other divergences
"""

from torchcaps.models.li2018.agreement_unit import AgreementUnit, MapShape
from torchcaps.models.li2018.encapsulated import CapsuleBlock2d, CapsuleFC
from torchcaps.models.li2018.feedback import FeedbackAgreement
from torchcaps.models.li2018.networks import (
    CapNet,
    CrossEntropyOfLengths,
    EncapNet,
    EncapsulatedModule2d,
    capnet_dynamic,
    capnet_em,
    encapnet_v1,
    encapnet_v2,
    shallow_cnn,
    shallow_encapnet,
)

__all__ = [
    "AgreementUnit",
    "CapNet",
    "CapsuleBlock2d",
    "CapsuleFC",
    "CrossEntropyOfLengths",
    "EncapNet",
    "EncapsulatedModule2d",
    "FeedbackAgreement",
    "MapShape",
    "capnet_dynamic",
    "capnet_em",
    "encapnet_v1",
    "encapnet_v2",
    "shallow_cnn",
    "shallow_encapnet",
]
