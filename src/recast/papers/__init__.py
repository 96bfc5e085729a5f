"""What only the papers need: networks, tasks, settings and recipes. Imports no torch.

`import recast.papers` adds settings, recipes, segmentation and detection; `import recast.papers.networks` registers the
other tasks, and networks with timm.
"""

import recast.papers.deit.config
import recast.papers.dense.config
import recast.papers.dense.detect
import recast.papers.dense.segment
import recast.papers.grafit.config  # noqa: F401
from recast.models.names import PLUGINS

if "recast.papers.networks" not in PLUGINS:
    PLUGINS.append("recast.papers.networks")
