"""What only the papers need: networks, tasks, settings and recipes. Imports no torch.

`import recast.papers` adds settings and recipes; `import recast.papers.networks` registers tasks, and networks with
timm.
"""

import recast.papers.deit.config
import recast.papers.grafit.config  # noqa: F401
from recast.models.names import PLUGINS

if "recast.papers.networks" not in PLUGINS:
    PLUGINS.append("recast.papers.networks")
