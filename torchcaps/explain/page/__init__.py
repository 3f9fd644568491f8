"""The page of `torchcaps explain`: one HTML file that shows what a network does, for people who do not know capsules.

`schema` says what the page shows. `pictures` encodes its images. `writing` puts all into one file, with `page.html`,
`page.css` and the scripts: `base.js` has what all others use, `charts.js` and `maps.js` draw, `page.js` starts them and
holds what is chosen, and the others make a section each. The file needs no network and no other file; only its links to
figures lead to files beside it.
"""

from torchcaps.explain.page.pictures import encoded_maps, picture, sprite
from torchcaps.explain.page.reports import STATISTICS, report
from torchcaps.explain.page.samples import Samples, image_samples, picture_samples, text_samples
from torchcaps.explain.page.schema import Report
from torchcaps.explain.page.writing import write_page

__all__ = [
    "STATISTICS",
    "Report",
    "Samples",
    "encoded_maps",
    "image_samples",
    "picture",
    "picture_samples",
    "report",
    "sprite",
    "text_samples",
    "write_page",
]
