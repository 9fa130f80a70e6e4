"""The architectures ``make models`` checks, by kind: random weights, small configurations, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.architectures.architecture import Architecture
from tests.models.architectures.language import DECODERS, ENCODER_DECODERS, ENCODERS, MIXTURES, STATE_SPACES
from tests.models.architectures.multimodal import MULTIMODAL
from tests.models.architectures.published import PUBLISHED
from tests.models.architectures.speech import SPEECH
from tests.models.architectures.vision import CLASSIFIERS, DETECTORS, SEGMENTERS

KINDS: Mapping[str, Mapping[str, Architecture]] = {
    "encoders": ENCODERS,
    "decoders": DECODERS,
    "encoders with decoders": ENCODER_DECODERS,
    "mixtures of experts": MIXTURES,
    "state-space models": STATE_SPACES,
    "speech": SPEECH,
    "image classification": CLASSIFIERS,
    "detection": DETECTORS,
    "segmentation and depth": SEGMENTERS,
    "text with images": MULTIMODAL,
    "published sizes": PUBLISHED,
}
ARCHITECTURES: Mapping[str, Architecture] = {name: one for kind in KINDS.values() for name, one in kind.items()}
