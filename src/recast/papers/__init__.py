"""What only the papers need: networks, settings and recipes. Imports no torch.

`import recast.papers` adds settings and recipes; `import recast.papers.networks` registers the networks with timm.
"""

import recast.papers.deit.config
import recast.papers.grafit.config  # noqa: F401
from recast.models.names import PLUGINS

if "recast.papers.networks" not in PLUGINS:
    PLUGINS.append("recast.papers.networks")
