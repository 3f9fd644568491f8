"""The page of `torchcaps explain`: one HTML file that shows what a network does, for people who do not know capsules.

`reports` and `examples` make what it shows of a network and `samples`: dictionaries, which become JSON. `pictures`
encodes its images; `writing` puts all into one file, which needs no network and no other file. Only its links to
figures lead to files beside it. The scripts: `base.js` has what all others use, `charts.js` and `maps.js` draw,
`page.js` starts them and holds what is chosen, and the others make a section each. The live page draws its examples
with the same scripts and `parts.css`; `live.js` and `drawing.js` are its own.
"""

from torchcaps.explain.page.reports import report
from torchcaps.explain.page.writing import write_page
from torchcaps.explain.samples import Samples, image_samples, picture_samples, samples_of, text_samples

__all__ = [
    "Samples",
    "image_samples",
    "picture_samples",
    "report",
    "samples_of",
    "text_samples",
    "write_page",
]
